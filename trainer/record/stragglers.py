"""Ranks and stages that hold the others up: own times in a step, beside those of their peers.

The ranks of one stage of a pipeline do the same work. The lag of a rank is the part of a step by
which its own time (loop/own_time.py) exceeds the median of its stage. The stages have different
work: the lag of a stage is the part of a step by which its median exceeds the time that its
operations would take at the pace of the other stages.
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
    """The rank that lags most in a step, or whose stage does."""

    rank: int
    lag: float
    """Part of the step."""
    steps: int
    """Steps in a row, up to this one, in which the lag was above the bound."""

    def entry(self) -> Entry:
        """Return its fields in the metrics of the step."""
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

    def waiting(self, lag: float) -> str:
        """Return who waits for it, and how long."""
        if self.stage is None:
            return f"the other ranks wait for it in {lag:.0%} of each step"
        return (
            f"the other stages wait for it in {lag:.0%} of each step, which the operations of its "
            "layers do not explain"
        )


class Stragglers:
    """Finds the ranks and the stages that lag in many steps in a row."""

    def __init__(
        self,
        bound: float,
        steps: int,
        stages: int = 1,
        work: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        """A rank becomes a straggler when it lags by more than `bound` in so many `steps` in a row,
        and is none when it has not done so for as many. `work` returns the operations of each
        stage, in any unit, for rows of a length; without it, stages are not compared."""
        self.bound = bound
        self.steps = steps
        self.stages = stages
        self.work = None if work is None else cache(work)
        self.lags: dict[Straggler, list[float]] = {}
        """Lags above the bound in a row, of those that have one in the last step."""
        self.even: dict[Straggler, int] = {}
        """Steps in a row in which a straggler has not lagged."""

    def step(self, own: Sequence[float], seconds: float, length: int) -> Slowest | None:
        """Take the own times of all ranks in a step of so many seconds, of rows of this length.
        Return the rank that lags most; None if nothing can be compared."""
        lags = self._lags(own, seconds, length)
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
        rank = max(slowest.ranks, key=own.__getitem__)
        return Slowest(rank, lags[slowest], len(self.lags.get(slowest, ())))

    def _lags(self, own: Sequence[float], seconds: float, length: int) -> dict[Straggler, float]:
        size = len(own) // self.stages
        middles = [median_low(own[first : first + size]) for first in range(0, len(own), size)]
        lags = {}
        if size > 1:
            for rank, time in enumerate(own):
                lags[Straggler(range(rank, rank + 1))] = (time - middles[rank // size]) / seconds
        if self.stages > 1 and self.work is not None:
            work = self.work(length)
            pace = median_low(
                [time / operations for time, operations in zip(middles, work, strict=True)]
            )
            for stage, time in enumerate(middles):
                ranks = range(stage * size, (stage + 1) * size)
                lags[Straggler(ranks, stage)] = (time - pace * work[stage]) / seconds
        return lags

    def changes(self, step: int) -> Iterator[tuple[str, int, str]]:
        """Yield an event's kind, its first rank and a sentence, for what `step` begins or ends."""
        for straggler, lags in self.lags.items():
            if len(lags) >= self.steps and straggler not in self.even:
                self.even[straggler] = 0
                waiting = straggler.waiting(sum(lags) / len(lags))
                yield (
                    BEGINS,
                    straggler.ranks[0],
                    f"{straggler} is slow: since step {step - len(lags) + 1} {waiting}",
                )
        ended = [straggler for straggler, steps in self.even.items() if steps >= self.steps]
        for straggler in ended:
            since = step - self.even.pop(straggler) + 1
            yield ENDS, straggler.ranks[0], f"{straggler} is no longer slow, since step {since}"
