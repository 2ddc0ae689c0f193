"""The index of a checkpoint runs no code, whoever wrote it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path, PosixPath

import pytest
import torch

from headrace.console.errors import CheckpointError
from headrace.models.parallel.local_shard import LocalShard
from headrace.trainer.checkpoints import tensors
from headrace.trainer.checkpoints.fragments import Fragment
from headrace.trainer.checkpoints.metadata import METADATA, parse
from headrace.trainer.layout.groups import Parallel


class Calls:
    """A pickle that calls a function when it is read."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, torch.load, eval])
def test_a_pickle_that_calls_a_function_is_refused(
    tmp_path: Path, function: Callable[..., object]
) -> None:
    data = pickle.dumps(Calls(function, str(tmp_path / "victim")))
    with pytest.raises(CheckpointError, match=rf"names \S+\.{function.__name__}, "):
        parse(data, "f")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("value", [b"ctorch\nSize\n", b"I1\n"])
@pytest.mark.parametrize("name", [b"exists", b"planted"])
def test_a_pickle_that_changes_a_class_is_refused(name: bytes, value: bytes) -> None:
    """The state (None, {name: value}) sets an attribute of the class that it is given to."""
    before = dict(vars(Path)), dict(vars(PosixPath))
    with pytest.raises(CheckpointError, match="damaged"):
        parse(b"cpathlib\nPosixPath\n(N}V" + name + b"\n" + value + b"stb.", "f")
    assert (dict(vars(Path)), dict(vars(PosixPath))) == before


@pytest.mark.parametrize("data", [b"", b"\x00abc", b"((", pickle.dumps(None), b"N}b."])
def test_a_damaged_index_is_named(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="index of the checkpoint's tensors is damaged") as e:
        parse(data, "the/file")
    assert e.value.where == "the/file"


def test_negative_control_an_ordinary_reader_calls_it(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(tmp_path / "victim"))))
    assert (tmp_path / "victim").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_indices_of_every_dtype_are_read(
    tmp_path: Path, parallel: Parallel, dtype: torch.dtype
) -> None:
    whole = torch.ones(4, 6).to(dtype)
    fragment = Fragment("master.w", LocalShard((4, 6)), 0, whole.flatten())
    tensors.write(tmp_path / "t", [fragment], parallel.control)
    assert tensors.StoredTensors(str(tmp_path / "t")).shapes("master") == {"w": (4, 6)}


def test_a_load_names_the_file_that_was_refused(tmp_path: Path, parallel: Parallel) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / METADATA).write_bytes(pickle.dumps(Calls(os.mkdir, str(tmp_path / "made"))))
    target = Fragment("master.w", LocalShard((2,)), 0, torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir") as caught:
        tensors.read(folder, [target], parallel.control)
    assert str(caught.value.where).endswith(METADATA)
    assert not (tmp_path / "made").exists()
