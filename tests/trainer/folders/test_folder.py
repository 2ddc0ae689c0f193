"""A run's folder: which files it may hold, and its lock."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import BusyError, RunError, StorageError
from headrace.trainer.folders import folder as folders
from headrace.trainer.folders.folder import RunFolder


def test_a_folder_with_other_files_is_refused(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cat.jpg").touch()
    with pytest.raises(RunError, match=r"holds other files \(cat\.jpg\)"):
        ask()


def test_a_start_killed_before_the_run_began_can_be_repeated(ask: Any, tmp_path: Path) -> None:
    """`prepare` and half of `save` have run, and run.yaml does not exist."""
    first = ask()
    first.folder.prepare()
    first.save()
    first.folder.run.unlink()
    for name in (".probe-0123abcd", ".run.yaml.0123abcd.tmp"):
        (first.folder.root / name).touch()
    (first.folder.root / ".lock").touch()
    again = ask()
    again.save()
    assert again.plan.hash == first.plan.hash
    again.folder.clear()
    assert not list(again.folder.root.glob(".[!l]*"))
    first.folder.run.unlink()
    (first.folder.checkpoints / "step-00000002").mkdir()
    with pytest.raises(RunError, match=r"holds other files \(checkpoints\)"):
        ask()


def test_only_rank_0_refuses_files_that_it_did_not_write(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.yaml.part").touch()
    monkeypatch.setenv("RANK", "1")
    assert not ask().folder.begun
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunError, match="holds other files"):
        ask()


def test_a_folder_that_cannot_be_written_to_is_refused(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write to the run's folder"):
        ask(out=tmp_path / "file" / "run").folder.prepare()


def test_one_process_holds_the_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():  # noqa: SIM117
        with pytest.raises(BusyError, match=r"in use by process \d+"), folder.locked():
            pass
    with folder.locked():
        pass


@pytest.fixture
def killed_launcher(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A lock that a rank still holds, and the process that took it and has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    lock = os.open(tmp_path / folders.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, f"process {process.pid} on {os.uname().nodename}".encode())
    yield lock, process.pid
    os.close(lock)


def test_the_lock_waits_for_ranks_whose_launcher_was_killed(
    tmp_path: Path, killed_launcher: tuple[int, int]
) -> None:
    lock, _ = killed_launcher
    threading.Timer(0.5, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
    with RunFolder(tmp_path).locked():
        assert f"process {os.getpid()} on" in (tmp_path / folders.LOCK).read_text()


def test_a_lock_does_not_name_a_process_that_has_ended_as_its_holder(
    tmp_path: Path, killed_launcher: tuple[int, int]
) -> None:
    with pytest.raises(BusyError, match="that process has ended") as caught:
        RunFolder(tmp_path).locked(orphan_seconds=0.2).__enter__()
    assert f"ranks that process {killed_launcher[1]} on" in str(caught.value)
