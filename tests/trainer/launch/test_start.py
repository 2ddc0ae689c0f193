"""From a job to its end, where no process is needed to see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.checkpoints import store
from headrace.trainer.cluster.ranks import INTERRUPTED
from headrace.trainer.launch import start
from headrace.trainer.launch.options import StartOptions


def test_a_run_that_is_stopped_before_its_first_step_is_no_failure(
    ask: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler that takes the machine away while the processes start is told to try again."""
    monkeypatch.setattr(start.launcher.Launcher, "run", lambda self: INTERRUPTED)
    job = ask()
    assert start.start(job, StartOptions()) == INTERRUPTED
    assert "stopped before the first step" in capsys.readouterr().err
    assert start.outcome(job, INTERRUPTED)["step"] == 0


def test_a_start_that_is_killed_while_it_finds_its_checkpoints_can_be_repeated(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with checkpoints and no run is refused: it is a run before it has any."""

    def dying(folder: Path, url: str, run: str) -> None:
        (folder / store.name(2)).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "adopt", dying)
    with pytest.raises(KeyboardInterrupt):
        start.start(ask("checkpoints.url=memory://bucket/run"), StartOptions())
    assert ask("checkpoints.url=memory://bucket/run").folder.begun
