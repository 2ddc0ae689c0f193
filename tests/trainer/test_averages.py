"""The moving average of the weights: on every engine, in checkpoints, and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tasks.parity import REFERENCE

from headrace.console.errors import CheckpointError
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.trainer.accounting.parameters import engine_state
from headrace.trainer.checkpoints import store
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.checkpoints.saver import Saver
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.run import config as run_config
from headrace.trainer.weights import source as sources

FOUR = ["fsdp2-0-bf16-pp2", "deepspeed-2-fp32-tp2", "fsdp2-2-fp32-cp2", "deepspeed-1-fp32-pp2"]


def check(in_processes: Any, folder: Path, ranks: int, layouts: list[str], **more: Any) -> None:
    result = in_processes(ranks, "averaged.averages", folder, layouts=layouts, **more)
    for layout, facts in result.items():
        assert facts.pop("distance") < 1e-6, layout
        assert all(facts.values()), (layout, facts)


def test_one_process_has_the_average_of_its_weights(in_processes: Any, tmp_path: Path) -> None:
    check(in_processes, tmp_path, 1, [REFERENCE, "deepspeed-0-fp32"])


@pytest.mark.slow
def test_every_engine_shards_it_and_reads_it_from_every_layout(
    in_processes: Any, tmp_path: Path
) -> None:
    check(in_processes, tmp_path, 2, ["deepspeed-1-bf16", "fsdp2-0-fp32-tp2"])


@pytest.mark.long
def test_gathered_weights_have_it_too(in_processes: Any, tmp_path: Path) -> None:
    layouts = ["fsdp2-0-fp32-block", "fsdp2-0-bf16-micro", "deepspeed-2-bf16", "deepspeed-3-fp32"]
    layouts += ["fsdp2-0-fp32-step"]
    check(in_processes, tmp_path, 2, layouts)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp2-0-fp32-block", "deepspeed-3-fp32"])
def test_compiled_blocks_have_it_too(in_processes: Any, tmp_path: Path, layout: str) -> None:
    check(in_processes, tmp_path, 2, [layout], backend="inductor")


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stages_and_replicas_have_it_too(in_processes: Any, tmp_path: Path, optimizer: str) -> None:
    check(in_processes, tmp_path, 4, FOUR, model="shared", optimizer=optimizer)


def test_a_checkpoint_gives_its_weights_and_their_average(
    parallel: Parallel, work: Any, tmp_path: Path
) -> None:
    engines = [work.make_engine(REFERENCE, parallel, **more) for more in ({"ema": 0.5}, {})]
    work.train(engines[0], parallel, 0, 1)
    keeper = Saver(tmp_path, CheckpointConfig(), parallel.checkpoint)
    for step, engine in enumerate(engines):
        keeper.save(engine.fragments(), work.state_at(step))
        keeper.wait()
    path = str(tmp_path / store.name(0))
    state = {
        fragment.key: fragment.data.view(fragment.shape) for fragment in engines[0].fragments()
    }
    for kind, average in (("master", False), ("ema", True)):
        read = sources.find(path, average=average).weights()
        assert len(read) > 5
        assert all(torch.equal(read[name], state[f"{kind}.{name}"]) for name in read)
    with pytest.raises(CheckpointError, match="step-00000001 holds no moving average"):
        sources.find(str(tmp_path / store.name(1)), average=True).weights()


def test_the_accounting_and_the_settings_know_it() -> None:
    model = build_meta(load_model_config("tiny-transformer"))
    name = next(name for name, _ in model.named_parameters())
    sizes = []
    for words in ([], ["optimizer.ema=0.999"]):
        run = run_config.build({}, words, source="a test")
        [held] = [
            part
            for part in engine_state(run, model, PRECISIONS["bf16"], "cuda", 2).state_parts
            if part.name == "optimizer"
        ]
        assert callable(held.bytes_per_parameter)
        sizes.append(held.bytes_per_parameter(name))
    assert sizes == [8, 12]
    assert AdamWConfig(ema=0.999).describe().endswith(", average 0.999")
    with pytest.raises(ValueError, match=r"ema must be in \(0, 1\), not 1.0"):
        AdamWConfig(ema=1.0)
