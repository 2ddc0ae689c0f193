"""Ranks that hold the others up: each rank's own time in a step, beside that of its peers.

The ranks of one stage of a pipeline do the same work. The lag of a rank is the part of a step by
which its own time (loop/own_time.py) exceeds the median of its stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import NamedTuple

from .logger import Entry

BEGINS, ENDS = "straggler", "straggler ended"
"""Events."""


class Slowest(NamedTuple):
    """The rank that lags most in a step."""

    rank: int
    lag: float
    """Part of the step."""
    steps: int
    """Steps in a row, up to this one, in which its lag was above the bound."""

    def entry(self) -> Entry:
        """Return its fields in the metrics of the step."""
        lag = round(self.lag, 4)
        return {"slowest_rank": self.rank, "slowest_lag": lag, "slowest_steps": self.steps}


class Stragglers:
    """Finds the ranks that lag in many steps in a row."""

    def __init__(self, bound: float, steps: int, stages: int = 1) -> None:
        """A rank becomes a straggler when it lags by more than `bound` in so many `steps` in a row,
        and is none when it has not done so for as many."""
        self.bound = bound
        self.steps = steps
        self.stages = stages
        self.lags: dict[int, list[float]] = {}
        """Lags above the bound in a row, of the ranks that have one in the last step."""
        self.even: dict[int, int] = {}
        """Steps in a row in which a straggler has not lagged."""

    def step(self, own: Sequence[float], seconds: float) -> Slowest | None:
        """Take the own times of all ranks in a step of so many seconds. Return the rank that lags
        most; None if no rank has a peer."""
        size = len(own) // self.stages
        if size < 2:
            return None
        middles = [median_low(own[first : first + size]) for first in range(0, len(own), size)]
        lags = [(time - middles[rank // size]) / seconds for rank, time in enumerate(own)]
        for rank, lag in enumerate(lags):
            if lag > self.bound:
                self.lags.setdefault(rank, []).append(lag)
            else:
                self.lags.pop(rank, None)
        for rank in self.even:
            self.even[rank] = 0 if rank in self.lags else self.even[rank] + 1
        rank = max(range(len(lags)), key=lags.__getitem__)
        return Slowest(rank, lags[rank], len(self.lags.get(rank, ())))

    def changes(self, step: int) -> Iterator[tuple[str, int, str]]:
        """Yield an event's kind, its rank and a sentence, for what `step` begins or ends."""
        for rank, lags in self.lags.items():
            if len(lags) >= self.steps and rank not in self.even:
                self.even[rank] = 0
                lag = sum(lags) / len(lags)
                yield (
                    BEGINS,
                    rank,
                    f"rank {rank} is slow: since step {step - len(lags) + 1} the other ranks wait "
                    f"for it in {lag:.0%} of each step",
                )
        for rank in [rank for rank, steps in self.even.items() if steps >= self.steps]:
            since = step - self.even.pop(rank) + 1
            yield ENDS, rank, f"rank {rank} is no longer slow, since step {since}"
