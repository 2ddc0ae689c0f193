"""Weights that follow from the sizes of the sources: `proportional`, `{temperature: 1.5}`.

The share of a source is in proportion to tokens ** (1 / temperature). A source that would exceed
its `max_epochs` gets what it has left; the others share the rest in the same proportions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...console.errors import PlanError

UNITS = 100_000
"""Shares are multiples of 1/UNITS: five decimals, which a plan holds exactly."""


@dataclass
class Supply:
    """The tokens that each source still has within its `max_epochs`, phase by phase."""

    left: dict[str, float]
    length: int
    """Tokens of the rows so far; 0 at the start."""
    longest: int = field(init=False)
    """Tokens of the longest of them."""

    def __post_init__(self) -> None:
        self.longest = self.length

    def change_length(self, length: int) -> None:
        """Begin a phase with rows of `length` tokens."""
        self.length, self.longest = length, max(self.longest, length)

    def rows(self, name: str, epochs: int) -> int:
        """Return the rows that a source certainly has left. Each epoch may leave a part of a row
        over; and the order may be a row ahead of the shares, two after longer rows."""
        spare = epochs + (1 if self.length == self.longest else 2)
        return max(0, math.floor((self.left[name] - spare * self.longest) / self.length))

    def take(self, shares: Mapping[str, float], tokens: int) -> None:
        """Take the shares of a phase of `tokens` tokens."""
        for name, share in shares.items():
            self.left[name] -= share * tokens


def size_weights(
    phase: str,
    sizes: Mapping[str, int],
    temperature: float,
    rows: int,
    most_rows: Mapping[str, int],
) -> tuple[dict[str, float], list[str]]:
    """Return the weights of a phase of `rows` rows, and the sources that `most_rows` limits."""
    largest = max(sizes.values())
    wanted = {name: (size / largest) ** (1 / temperature) for name, size in sizes.items()}
    most = {name: min(most_rows[name] * UNITS // rows, UNITS) for name in sizes}
    if sum(most.values()) < UNITS:
        share = sum(most.values()) / UNITS
        raise PlanError(
            f"phase {phase} asks for more tokens than its sources have left within their "
            f"max_epochs: they can fill {share:.1%} of it",
            hint="shorten the phase, add data, or raise `max_epochs`",
        )
    limited = _limited(wanted, most)
    units = _whole(wanted, most, limited)
    return {name: number / UNITS for name, number in units.items()}, sorted(
        limited, key=list(sizes).index
    )


def _limited(wanted: Mapping[str, float], most: Mapping[str, int]) -> set[str]:
    """Return the sources that get all they have, so that the others can be in proportion."""
    limited: set[str] = set()
    while True:
        free = [name for name in wanted if name not in limited]
        room = UNITS - sum(most[name] for name in limited)
        total = sum(wanted[name] for name in free)
        over = {name for name in free if wanted[name] * room > most[name] * total}
        if not over:
            return limited
        limited |= over


def _whole(
    wanted: Mapping[str, float], most: Mapping[str, int], limited: set[str]
) -> dict[str, int]:
    """Return whole units that sum to UNITS; a source gets at least one if it has one left."""
    room = UNITS - sum(most[name] for name in limited)
    total = sum(share for name, share in wanted.items() if name not in limited)
    exact = {
        name: most[name] if name in limited else share * room / total
        for name, share in wanted.items()
    }
    units = {name: min(max(1, math.floor(share)), most[name]) for name, share in exact.items()}
    # Rounding leaves some units over, or takes some for sources that got their first one.
    while (short := UNITS - sum(units.values())) > 0:
        for name in _by_need(units, exact, lambda name: units[name] < most[name])[:short]:
            units[name] += 1
    while (over := sum(units.values()) - UNITS) > 0:
        for name in _by_need(units, exact, lambda name: units[name] > 1)[-over:]:
            units[name] -= 1
    return units


def _by_need(
    units: Mapping[str, int], exact: Mapping[str, float], eligible: Callable[[str], bool]
) -> Sequence[str]:
    """Return the eligible sources, those that are furthest below their exact share first."""
    return sorted(filter(eligible, units), key=lambda name: units[name] - exact[name])
