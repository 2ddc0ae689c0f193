"""Goodput with failures beside a Monte Carlo simulation, and the intervals of Young and Daly."""

from __future__ import annotations

import math
import random

import pytest

from headrace.console.errors import MisuseError
from headrace.planner.simulation.failures import (
    Failures,
    best_interval,
    daly_interval,
    goodput,
    parse_failures,
    young_interval,
)

CASES = [  # mean seconds between failures, step, steps between checkpoints
    (Failures(save=20.0, write=0.0, restart=100.0), 900.0, 7.0, 20),
    (Failures(save=5.0, write=90.0, restart=60.0), 700.0, 10.0, 15),
    (Failures(save=5.0, write=400.0, restart=30.0), 1500.0, 10.0, 20),  # a save waits for a write
    (Failures(save=0.0, write=30.0, restart=500.0), 400.0, 30.0, 4),
]


def monte_carlo(known: Failures, mean: float, step: float, every: int, failures: int) -> float:
    """Run a job through so many failures, event by event; return the fraction that trained."""
    draw = random.Random(0)
    clock = trained = 0.0
    for _ in range(failures):
        life = draw.expovariate(1 / mean)
        clock += life
        now, written = known.restart, 0.0
        while True:
            now = max(now + every * step, written) + known.save
            written = now + known.write
            if written > life:
                break
            trained += every * step
    return trained / clock


@pytest.mark.parametrize("case", CASES)
def test_goodput_is_that_of_a_monte_carlo_simulation(
    case: tuple[Failures, float, float, int],
) -> None:
    result = goodput(*case)
    assert 0.1 < result < 0.9
    assert monte_carlo(*case, failures=40_000) == pytest.approx(result, rel=0.02)


def test_a_goodput_without_background_writes_is_detected() -> None:
    """Negative control of the test above."""
    known, *arguments = CASES[1]
    without = Failures(save=known.save, write=0.0, restart=known.restart)
    measured = monte_carlo(known, *arguments, failures=40_000)  # type: ignore[arg-type]
    assert goodput(without, *arguments) > 1.05 * measured  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_the_best_interval_equals_trying_all(case: tuple[Failures, float, float, int]) -> None:
    known, mean, step, _ = case
    tried = {every: goodput(known, mean, step, every) for every in range(1, 400)}
    assert best_interval(known, mean, step) == max(tried, key=lambda every: tried[every])


def test_formulas_are_near_the_best_interval() -> None:
    """Daly's is the nearer one where a save is long. A background write is like a longer restart,
    unless it is longer than the interval."""
    known, mean = Failures(save=30.0, write=300.0), 3600.0
    assert young_interval(known, mean) == pytest.approx(math.sqrt(2 * 30 * 3600))
    best = best_interval(known, mean, 0.1) * 0.1
    assert daly_interval(known, mean) == pytest.approx(best, rel=0.001)
    assert abs(young_interval(known, mean) - best) > 15
    slower = Failures(save=30.0, write=600.0)
    assert best_interval(slower, mean, 0.1) * 0.1 > 1.2 * best


def test_a_job_that_never_restarts_in_time_does_not_train() -> None:
    assert goodput(Failures(restart=1e6), 60.0, 1.0, 10) == 0.0


def test_failures_are_read_from_words() -> None:
    known = parse_failures("mtbf=20000,save=3,every=50")
    assert (known.mtbf, known.save, known.every) == (20000.0, 3.0, 50)
    assert known.mean_seconds(1000) == 20 * 3600
    assert parse_failures("") == Failures()
    for text in ("mtbf", "mtbf=x", "life=3", "every=2.5", "mtbf=0", "save=-1", "write=inf"):
        with pytest.raises(MisuseError, match="--failures"):
            parse_failures(text)
