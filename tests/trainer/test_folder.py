"""Whose a folder is, and that one run at a time has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import BusyError, RunError, StorageError
from headrace.trainer.folder import RunFolder, differences


def test_a_changed_mixture_is_named() -> None:
    before = {"phases": {"stable": {"weights": {"web": 0.7, "code": 0.3}}}}
    after = {"phases": {"stable": {"weights": {"web": 0.6, "code": 0.3, "new": 0.1}}}}
    assert differences(before, after, "mixture") == [
        "mixture.phases.stable.weights.web: 0.7 there, 0.6 here",
        "mixture.phases.stable.weights.new: None there, 0.1 here",
    ]


def test_a_folder_with_other_things_is_left_alone(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cat.jpg").touch()
    with pytest.raises(RunError, match=r"holds other things \(cat\.jpg\)"):
        ask()


def test_what_died_before_it_began_can_be_started_again(ask: Any, tmp_path: Path) -> None:
    """`prepare` and half of `save` have happened; run.yaml, which makes it a run, is not there."""
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
    with pytest.raises(RunError, match=r"holds other things \(checkpoints\)"):
        ask()


def test_a_later_rank_does_not_stumble_over_what_the_first_has_written(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.yaml.part").touch()
    monkeypatch.setenv("RANK", "1")
    assert not ask().folder.begun
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RunError, match="holds other things"):
        ask()


def test_a_folder_that_cannot_be_written_to(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write to the run's folder"):
        ask(out=tmp_path / "file" / "run").folder.prepare()


def test_a_folder_is_held_by_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():  # noqa: SIM117
        with pytest.raises(BusyError, match=r"in use by process \d+"), folder.locked():
            pass
    with folder.locked():
        pass
