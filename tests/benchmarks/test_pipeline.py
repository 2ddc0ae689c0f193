"""The benchmark's prediction of a step whose stages share cores."""

from __future__ import annotations

import pytest

from benchmarks.pipeline import on_cores
from headrace.trainer.layout.schedules import SCHEDULES
from headrace.trainer.layout.simulate import simulate

CASES = [("1f1b", 4, 1), ("gpipe", 3, 1), ("interleaved", 2, 2)]


@pytest.mark.parametrize(("schedule", "stages", "chunks"), CASES)
def test_cores_are_a_resource_of_a_step(schedule: str, stages: int, chunks: int) -> None:
    """With a core for each stage the time is the simulator's; one core is never idle."""
    orders = SCHEDULES[schedule].orders(stages, chunks, 5)
    forward = [1.0 + 0.37 * chunk for chunk in range(stages * chunks)]
    times = {"forward": forward, "backward": [2.1 * item for item in forward]}
    free = simulate(orders, times).time
    assert on_cores(orders, times, stages) == pytest.approx(free)
    work = 5 * (sum(times["forward"]) + sum(times["backward"]))
    assert on_cores(orders, times, 1) == pytest.approx(work)
    assert on_cores(orders, times, 2) >= max(free, work / 2) * (1 - 1e-9)
    assert on_cores(orders, times, 0.5) == pytest.approx(2 * work)
