"""Successive halving: many short trials, then longer ones of the better half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .trial import Result

LEAD = 1.1
"""Ratio to the second best at which the best is found: longer trials do not close such a gap."""


@dataclass(frozen=True)
class Ranked:
    """Result of a search by trials."""

    results: dict[int, Result]
    """Last result of each candidate."""
    best: int | None
    """None if no trial was measured."""
    rounds: int
    early: bool
    """True if trials were saved, because the best was far ahead."""


def halve(count: int, steps: int, measure: Callable[[int, int, int], Result]) -> Ranked:
    """Measure candidates 0 to `count` - 1, the best predicted first. `measure(candidate, round,
    steps)` returns a result; each round has half of the candidates and twice the steps."""
    alive: Sequence[int] = range(count)
    results: dict[int, Result] = {}
    number = 0
    while True:
        for candidate in alive:
            results[candidate] = measure(candidate, number, steps << number)
        number += 1
        seconds = {
            each: result.seconds for each in alive if (result := results[each]).seconds is not None
        }
        order = sorted(seconds, key=lambda each: (seconds[each], each))
        if not order:
            return Ranked(results, None, number, early=False)
        best, kept = order[0], order[: -(-len(alive) // 2)]
        far = len(order) > 1 and seconds[order[1]] > LEAD * seconds[best]
        if len(kept) == 1 or len(alive) == 1 or far:
            return Ranked(results, best, number, early=far and len(kept) > 1)
        alive = sorted(kept)
