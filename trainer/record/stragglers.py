"""Find ranks and pipeline stages that slow the run: their compute times beside their peers'.

Ranks in one stage do the same work. A rank's lag is the fraction of a step by which its compute
time (loop/compute_time.py) exceeds its stage's median. Stages differ in work: a stage's lag is the
fraction of a step by which its median exceeds the time that its operations would take at the
median pace of all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import median_low
from typing import NamedTuple

from .logger import Entry

BEGINS, ENDS = "straggler", "straggler ended"
"""Events."""


class Slowest(NamedTuple):
    """The slowest rank in a step: the one with the largest lag, or in the stage with it."""

    rank: int
    lag: float
    """Fraction of the step."""
    steps: int
    """Consecutive steps, up to this one, with a lag above the bound."""

    def entry(self) -> Entry:
        """Return the fields for the step's metrics."""
        return {
            "slowest_rank": self.rank,
            "slowest_lag": self.lag,
            "slowest_steps": self.steps,
        }


class Straggler(NamedTuple):
    """A rank or a stage."""

    ranks: range
    stage: int | None = None

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return ranks if self.stage is None else f"stage {self.stage} ({ranks})"

    def describe_wait(self, lag: float) -> str:
        """Say who waits for it, and how long."""
        if self.stage is None:
            return f"the other ranks wait for it in {lag:.0%} of each step"
        return (
            f"the other stages wait for it in {lag:.0%} of each step, which the operations of its "
            "layers do not explain"
        )


class Stragglers:
    """Finds ranks and stages that lag in many consecutive steps."""

    def __init__(
        self,
        bound: float,
        steps: int,
        stages: int = 1,
        work: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        """A rank becomes a straggler after `steps` consecutive steps with a lag above `bound`, and
        recovers after as many without. `work` returns operations by stage, in any unit, for a
        sequence length; without it, stages are not compared."""
        self.bound = bound
        self.steps = steps
        self.stages = stages
        self.work = None if work is None else cache(work)
        self.lags: dict[Straggler, list[float]] = {}
        """Consecutive lags above the bound, up to the last step."""
        self.even: dict[Straggler, int] = {}
        """Consecutive steps without a lag, by reported straggler."""

    def add_step(
        self, compute_times: Sequence[float], seconds: float, length: int
    ) -> Slowest | None:
        """Add the compute times by rank in a step that took `seconds`, with rows of `length`
        tokens. Return the slowest rank; None if nothing can be compared."""
        lags = self._compute_lags(compute_times, seconds, length)
        if not lags:
            return None
        for straggler, lag in lags.items():
            if lag > self.bound:
                self.lags.setdefault(straggler, []).append(lag)
            else:
                self.lags.pop(straggler, None)
        for straggler in self.even:
            self.even[straggler] = 0 if straggler in self.lags else self.even[straggler] + 1
        slowest = max(lags, key=lags.__getitem__)
        rank = max(slowest.ranks, key=compute_times.__getitem__)
        return Slowest(rank, lags[slowest], len(self.lags.get(slowest, ())))

    def _compute_lags(
        self, compute_times: Sequence[float], seconds: float, length: int
    ) -> dict[Straggler, float]:
        size = len(compute_times) // self.stages
        medians = [
            median_low(compute_times[first : first + size])
            for first in range(0, len(compute_times), size)
        ]
        lags = {}
        if size > 1:
            for rank, time in enumerate(compute_times):
                lags[Straggler(range(rank, rank + 1))] = (time - medians[rank // size]) / seconds
        if self.stages > 1 and self.work is not None:
            work = self.work(length)
            pace = median_low(
                [time / operations for time, operations in zip(medians, work, strict=True)]
            )
            for stage, time in enumerate(medians):
                ranks = range(stage * size, (stage + 1) * size)
                lags[Straggler(ranks, stage)] = (time - pace * work[stage]) / seconds
        return lags

    def changes(self, step: int) -> Iterator[tuple[str, int, str]]:
        """Yield the stragglers that begin or end at `step`: event, first rank, message."""
        for straggler, lags in self.lags.items():
            if len(lags) >= self.steps and straggler not in self.even:
                self.even[straggler] = 0
                wait = straggler.describe_wait(sum(lags) / len(lags))
                yield (
                    BEGINS,
                    straggler.ranks[0],
                    f"{straggler} is slow: since step {step - len(lags) + 1} {wait}",
                )
        recovered = [straggler for straggler, steps in self.even.items() if steps >= self.steps]
        for straggler in recovered:
            since = step - self.even.pop(straggler) + 1
            yield ENDS, straggler.ranks[0], f"{straggler} is no longer slow, since step {since}"
