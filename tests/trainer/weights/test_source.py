from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.console.errors import CheckpointError
from headrace.models.config.config import load_model_config
from headrace.models.model.model import Model
from headrace.trainer.checkpoints import store
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.weights import source as sources
from headrace.trainer.weights.export import export
from headrace.trainer.weights.source import Checkpoint, ModelFolder

Save = Callable[..., RunFolder]


@pytest.fixture
def model() -> Model:
    result = Model(load_model_config("tiny-transformer", ["vocab_size=64"]))
    result.init_weights(1)
    return result


def test_one_path_names_a_run_a_checkpoint_or_a_folder(
    model: Model, checkpoint_of: Save, tmp_path: Path
) -> None:
    run = checkpoint_of(model, 3)
    checkpoint_of(model, 5)
    newest, third = (str(path) for path in store.committed(run.checkpoints)[::-1])
    out = str(tmp_path / "out")
    export(sources.find(str(run.root)), out, "huggingface", dtype="fp32", tokenizer=None)
    for path, step, where in (
        (str(run.root), None, newest),
        (str(run.root), 3, third),
        (third, None, third),
        (third + "/", None, third),
        (out, None, out),
    ):
        result = sources.find(path, step)
        assert result.where == where
        assert isinstance(result, ModelFolder if path == out else Checkpoint)
        weights = result.weights()
        for name, parameter in model.named_parameters():
            assert torch.equal(weights[name], parameter.detach())


def test_a_checkpoint_holds_its_model_configuration(
    model: Model, checkpoint_of: Save, tmp_path: Path
) -> None:
    run = checkpoint_of(model)
    (moved,) = store.committed(run.checkpoints)
    moved = moved.rename(tmp_path / moved.name)
    assert sources.find(str(moved)).model == model.config


def test_a_path_without_weights_is_refused(
    model: Model, checkpoint_of: Save, tmp_path: Path
) -> None:
    run = checkpoint_of(model, 3)
    with pytest.raises(CheckpointError, match="does not exist"):
        sources.find(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="holds no weights"):
        sources.find(str(tmp_path))
    with pytest.raises(CheckpointError, match="no checkpoint of step 4") as caught:
        sources.find(str(run.root), 4)
    assert caught.value.hint is not None and "3" in caught.value.hint
    with pytest.raises(CheckpointError, match="no checkpoint of step 4") as caught:
        sources.find(str(run.checkpoints / store.name(4)))  # as a branch does
    assert caught.value.hint == "name a step that has one: 3"
    (saved,) = store.committed(run.checkpoints)
    (file,) = (saved / "tensors").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="is damaged"):
        sources.find(str(run.root)).weights()
