"""Starting a job, as far as it needs no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.trainer.checkpoints import store
from headrace.trainer.cluster.ranks import INTERRUPTED
from headrace.trainer.launch import start
from headrace.trainer.launch.options import StartOptions


def test_a_stop_before_the_first_step_is_no_failure(
    ask: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a scheduler stops the ranks while they start, the exit code asks for another start."""
    monkeypatch.setattr(start.launcher.Launcher, "run", lambda self: INTERRUPTED)
    job = ask()
    assert start.start(job, StartOptions(), Mock(), Mock(), Mock()) == INTERRUPTED
    assert "stopped before the first step" in capsys.readouterr().err
    assert start.describe_outcome(job, INTERRUPTED)["step"] == 0


def test_a_start_killed_while_adopting_checkpoints_can_be_repeated(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """run.yaml is written before checkpoints: a folder with checkpoints alone is rejected."""

    def dying(folder: Path, *_: Any) -> None:
        (folder / store.name(2)).mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "adopt", dying)
    with pytest.raises(KeyboardInterrupt):
        start.start(
            ask("checkpoints.url=memory://bucket/run"),
            StartOptions(),
            Mock(),
            Mock(),
            Mock(),
        )
    assert ask("checkpoints.url=memory://bucket/run").folder.begun
