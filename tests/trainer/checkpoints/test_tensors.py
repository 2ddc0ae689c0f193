from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from headrace.console.errors import CheckpointError, StorageError
from headrace.models.parallel.local_shard import LocalShard
from headrace.trainer.checkpoints import tensors
from headrace.trainer.checkpoints.fragments import Fragment
from headrace.trainer.layout.groups import Parallel


def halves(key: str, whole: torch.Tensor, cut: int) -> list[Fragment]:
    """Return a tensor as two ranges, as two ranks hold it."""
    flat = whole.flatten()
    shape = tuple(whole.shape)
    return [
        Fragment(key, LocalShard(shape), 0, flat[:cut].clone()),
        Fragment(key, LocalShard(shape), cut, flat[cut:].clone()),
    ]


def test_fragments_are_read_with_another_split(tmp_path: Path, parallel: Parallel) -> None:
    whole = torch.randn(7, 5)
    tensors.write(tmp_path / "t", halves("master.w", whole, 13), parallel.control)
    targets = halves("master.w", torch.zeros(7, 5), 22)
    tensors.read(tmp_path / "t", targets, parallel.control)
    assert torch.equal(torch.cat([f.data for f in targets]), whole.flatten())


def test_torch_tools_read_the_files(tmp_path: Path, parallel: Parallel) -> None:
    whole, scalar = torch.randn(6, 4), torch.tensor(3.5)
    fragments = [
        *halves("master.w", whole, 9),
        Fragment("master.s", LocalShard(()), 0, scalar.view(1)),
    ]
    tensors.write(tmp_path / "t", fragments, parallel.control)
    dcp_to_torch_save(tmp_path / "t", tmp_path / "one.pt")
    read = torch.load(tmp_path / "one.pt")
    assert torch.equal(read["master.w"], whole) and torch.equal(read["master.s"], scalar)


def test_a_tensor_with_a_hole_is_refused(tmp_path: Path, parallel: Parallel) -> None:
    first, _ = halves("master.w", torch.randn(6, 4), 9)
    with pytest.raises(CheckpointError, match=r"master\.w .* 9 of its 24 elements"):
        tensors.write(tmp_path / "t", [first], parallel.control)


def test_tensors_of_another_model_are_refused(tmp_path: Path, parallel: Parallel) -> None:
    tensors.write(tmp_path / "t", halves("master.w", torch.randn(6, 4), 9), parallel.control)
    with pytest.raises(CheckpointError, match=r"holds no master\.other"):
        tensors.read(tmp_path / "t", halves("master.other", torch.zeros(6, 4), 9), parallel.control)
    with pytest.raises(CheckpointError, match=r"shape \[6, 4\], the model's has \[4, 6\]"):
        tensors.read(tmp_path / "t", halves("master.w", torch.zeros(4, 6), 9), parallel.control)


def test_hashes_match_the_files_on_disk(tmp_path: Path, parallel: Parallel) -> None:
    import hashlib

    files = tensors.write(
        tmp_path / "tensors", halves("master.w", torch.randn(6, 4), 9), parallel.control
    )
    assert {file.name for file in files} == {"tensors/.metadata", "tensors/__0_0.distcp"}
    for file in files:
        data = (tmp_path / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.sha256)


def test_an_unwritable_folder_is_an_error(tmp_path: Path, parallel: Parallel) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot write a checkpoint"):
        tensors.write(tmp_path / "file" / "t", halves("m", torch.randn(6, 4), 9), parallel.control)


def test_a_written_stream_is_closed_before_its_file(tmp_path: Path) -> None:
    """Else Python 3.13 reports its collection: it would flush a closed file."""
    files = tensors.HashingFiles(lambda size: None)
    with files.create_stream(tmp_path / "a", "wb") as stream:
        stream.write(b"ab")  # type: ignore[attr-defined]
    assert files.written["a"].closed
    assert files.written["a"].size == 2
    assert (tmp_path / "a").read_bytes() == b"ab"
