from __future__ import annotations

from typing import Any

import pytest


def test_curves_are_written_without_missing_values(records: Any) -> None:
    run = records(peak=None)
    recorder = run.open(tensorboard=True)
    recorder.step_done(run.step(0))
    recorder.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.folder.tensorboard))
    board.Reload()
    assert board.Scalars("loss/all")[0].value == pytest.approx(3.0)
    assert "speed/mfu" not in board.Tags()["scalars"]


def test_it_can_be_turned_off(records: Any) -> None:
    run = records()
    run.open(tensorboard=False).close()
    assert not run.folder.tensorboard.exists()
