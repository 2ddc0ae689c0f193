from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.console.errors import CheckpointError, StorageError
from headrace.models.parallel.local_shard import LocalShard
from headrace.trainer.checkpoints import saver, store, tensors
from headrace.trainer.checkpoints.fragments import Fragment
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.layout.groups import Parallel


def state(step: int) -> RunState:
    return RunState(
        step=step, row=step, tokens=step, plan_hash="p", updates=step, ledger="", seed=1
    )


def fragment(data: torch.Tensor) -> Fragment:
    return Fragment("master.w", LocalShard(tuple(data.shape)), 0, data.view(-1))


def test_a_save_holds_the_values_at_its_step(
    tmp_path: Path, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues before the thread has written anything."""
    live = torch.arange(12.0).view(3, 4)
    trained_on = threading.Event()
    write = tensors.write

    def write_late(*arguments: Any) -> Any:
        trained_on.wait()
        return write(*arguments)

    monkeypatch.setattr(tensors, "write", write_late)
    keeper = saver.Saver(tmp_path, CheckpointConfig(), parallel.checkpoint)
    keeper.save([fragment(live)], state(1))
    live.fill_(-1)
    trained_on.set()
    keeper.wait()
    target = torch.zeros(3, 4)
    loaded = saver.load(tmp_path / store.name(1), [fragment(target)], parallel.checkpoint)
    assert loaded == state(1)
    assert torch.equal(target, torch.arange(12.0).view(3, 4))


def test_a_file_that_cannot_grow_is_an_error_and_leaves_no_partial_files(
    tmp_path: Path, parallel: Parallel
) -> None:
    keeper = saver.Saver(tmp_path, CheckpointConfig(), parallel.checkpoint)
    keeper.save([fragment(torch.zeros(4, 4))], state(1))
    keeper.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        keeper.save([fragment(torch.zeros(400, 400))], state(2))
        with pytest.raises(StorageError, match="larger than the file system"):
            keeper.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == [store.name(1)]
    keeper.save([fragment(torch.zeros(400, 400))], state(3))
    keeper.wait()
    assert [store.parse_step(path) for path in store.committed(tmp_path)] == [1, 3]


@pytest.mark.parametrize("background", [True, False])
def test_a_run_that_waits_for_a_save_sees_the_time_left(
    tmp_path: Path,
    parallel: Parallel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    background: bool,
) -> None:
    half_written, seen = threading.Event(), threading.Event()
    write = tensors.write

    def stopping(folder: Path, parts: Any, group: Any, written: Any) -> Any:
        written(parts[0].data.nbytes // 2)
        half_written.set()
        seen.wait(300)
        return write(folder, parts, group)

    class Shown(saver.Progress):
        def advance(self, amount: float = 1, **counters: float) -> None:
            super().advance(amount, **counters)
            if half_written.is_set():
                self.show()
                seen.set()

    monkeypatch.setattr(tensors, "write", stopping)
    monkeypatch.setattr(saver, "Progress", Shown)
    config = CheckpointConfig(background=background)
    keeper = saver.Saver(tmp_path, config, parallel.checkpoint, quiet_seconds=0.01)
    keeper.save([fragment(torch.zeros(100, 100))], state(7))
    keeper.wait()
    shown = capsys.readouterr().err
    assert "saving step 7: 20 KB of 40 KB (50%)" in shown and " left" in shown


def test_headers_of_files_do_not_count(
    tmp_path: Path,
    parallel: Parallel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A tiny model: most bytes of its files are no numbers."""
    written, shown = threading.Event(), threading.Event()
    write = tensors.write

    def stopping(*words: Any) -> Any:
        files = write(*words)
        written.set()
        shown.wait(300)
        return files

    class Shown(saver.Progress):
        def advance(self, amount: float = 1, **counters: float) -> None:
            super().advance(amount, **counters)
            if written.is_set():
                self.show()
                shown.set()

    monkeypatch.setattr(tensors, "write", stopping)
    monkeypatch.setattr(saver, "Progress", Shown)
    config = CheckpointConfig(background=False)
    keeper = saver.Saver(tmp_path, config, parallel.checkpoint, quiet_seconds=0.01)
    keeper.save([fragment(torch.zeros(4, 4))], state(7))
    keeper.wait()
    assert "saving step 7: 64 bytes of 64 bytes (100%)" in capsys.readouterr().err


def test_a_short_save_shows_nothing(
    tmp_path: Path, parallel: Parallel, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = saver.Saver(tmp_path, CheckpointConfig(background=False), parallel.checkpoint)
    keeper.save([fragment(torch.zeros(4, 4))], state(1))
    keeper.wait()
    assert capsys.readouterr().err == ""


def test_a_lost_rank_is_reported_to_the_waiting_caller_only(
    tmp_path: Path,
    parallel: Parallel,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The launcher prints the error itself, not the traceback of a thread."""

    def raise_closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(saver.dist, "all_gather_object", raise_closed)
    keeper = saver.Saver(tmp_path, CheckpointConfig(), parallel.checkpoint)
    keeper.save([fragment(torch.zeros(4, 4))], state(1))
    with pytest.raises(RuntimeError, match="closed by peer"):
        keeper.wait()
    assert not keeper.failed and capfd.readouterr() == ("", "")


def test_a_damaged_checkpoint_does_not_load(tmp_path: Path, parallel: Parallel) -> None:
    keeper = saver.Saver(tmp_path, CheckpointConfig(background=False), parallel.checkpoint)
    keeper.save([fragment(torch.ones(40, 40))], state(1))
    path = tmp_path / store.name(1)
    place = path / "tensors" / "__0_0.distcp"
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    target = torch.zeros(40, 40)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        saver.load(path, [fragment(target)], parallel.checkpoint)
    assert not target.any(), "nothing is read from a damaged checkpoint"
