"""A run's folder: which files it may hold, and its lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import BusyError, RunError, StorageError
from headrace.trainer.folder import RunFolder


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
