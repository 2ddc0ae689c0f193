"""Hooks are called in turn, at every event."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from headrace.console.errors import RunError
from headrace.trainer.cluster import slurm
from headrace.trainer.loop.hooks.hook import Hook, Hooks
from headrace.trainer.loop.hooks.slurm_notes import SlurmNotes

EVENTS = [name for name, _ in inspect.getmembers(Hook, inspect.isfunction)]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_each_hook_in_turn(event: str) -> None:
    calls = mock.Mock()
    calls.first.measure.return_value, calls.second.measure.return_value = {"a": 1}, {"b": 2}
    values: dict[str, Any] = {
        name: mock.sentinel.value
        for name in inspect.signature(getattr(Hook, event)).parameters
        if name != "self"
    }
    answer = getattr(Hooks([calls.first, calls.second]), event)(**values)
    assert [name for name, *_ in calls.mock_calls] == [f"first.{event}", f"second.{event}"]
    first, second = calls.mock_calls
    assert (*first.args, *first.kwargs.values()) == (*values.values(),)
    assert (first.args, first.kwargs) == (second.args, second.kwargs)
    assert answer == ({"a": 1, "b": 2} if event == "measure" else None)


def test_the_batch_script_reads_how_a_start_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "note"
    monkeypatch.setenv(slurm.NOTE, str(file))
    notes, state = SlurmNotes(stop_after=7), SimpleNamespace(step=7)

    def note() -> str:
        text = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        return text

    notes.sealed(5, 0.1, RunError("the disk is full"))
    assert note() == "", "nothing was saved"
    notes.sealed(5, 0.1, None)
    assert note() == "saved 5\n"
    notes.ended(state, finished=True)  # type: ignore[arg-type]
    assert note() == "finished 7\n"
    notes.ended(state, finished=False)  # type: ignore[arg-type]
    assert note() == "stopped 7\n", "a person asked for it"
    notes.ended(SimpleNamespace(step=6), finished=False)  # type: ignore[arg-type]
    assert note() == "", "the job is requeued by its last save"
    notes.failed(6, RunError("lost a rank"))
    assert note() == "failed 6\n"
