"""Successive halving: many short trials, then longer trials with the better half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .trial import TrialResult

LEAD = 1.1
"""Ratio of the second best to the best at which trials end: longer ones do not close such a gap."""


@dataclass(frozen=True)
class HalvingResult:
    """Results and winner of a search by trials."""

    results: dict[int, TrialResult]
    """Last result by candidate."""
    best: int | None
    """None if no trial was measured."""
    rounds: int
    early: bool
    """True if trials were saved, because the best was far ahead."""


def halve(count: int, steps: int, measure: Callable[[int, int, int], TrialResult]) -> HalvingResult:
    """Measure candidates 0 to `count` - 1, ordered by prediction, the best first.

    `measure(candidate, round, steps)` returns a result. A round has half the candidates and twice
    the steps of the round before.
    """
    candidates: Sequence[int] = range(count)
    results: dict[int, TrialResult] = {}
    number = 0
    while True:
        for candidate in candidates:
            results[candidate] = measure(candidate, number, steps << number)
        number += 1
        seconds = {
            candidate: result.seconds
            for candidate in candidates
            if (result := results[candidate]).seconds is not None
        }
        order = sorted(seconds, key=lambda candidate: (seconds[candidate], candidate))
        if not order:
            return HalvingResult(results, None, number, early=False)
        best, better_half = order[0], order[: -(-len(candidates) // 2)]
        is_far_ahead = len(order) > 1 and seconds[order[1]] > LEAD * seconds[best]
        if len(better_half) == 1 or len(candidates) == 1 or is_far_ahead:
            return HalvingResult(results, best, number, early=is_far_ahead and len(better_half) > 1)
        candidates = sorted(better_half)
