"""Weights that follow from the sizes of the sources: `proportional`, `{temperature: 1.5}`.

The share of a source is in proportion to tokens ** (1 / temperature). A source that would exceed
its `max_epochs` gets exactly what it has left (supply.py); the others share the rest in the same
proportions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...console.errors import PlanError

UNITS = 100_000
"""Shares are multiples of 1/UNITS, five decimals, if `max_epochs` limits none of them."""
FEWEST_UNITS = 1000
"""Units for each source that is not limited, at least: else they are made finer."""


@dataclass(frozen=True)
class SizeWeights:
    """The shares of a phase that follow from sizes."""

    shares: Mapping[str, Fraction]
    limited: Sequence[str]
    """The sources that get what they have left."""
    left_out: Mapping[str, int]
    """Rows that each of these would get besides without its `max_epochs`."""


def size_weights(
    phase: str,
    sizes: Mapping[str, int],
    temperature: float,
    rows: int,
    most: Mapping[str, Fraction],
) -> SizeWeights:
    """Return the weights of a phase of `rows` rows. `most`: the rows that each source has left."""
    largest = max(sizes.values())
    wanted = {name: (size / largest) ** (1 / temperature) for name, size in sizes.items()}
    if sum(most.values()) < rows:
        share = float(sum(most.values()) / rows)
        raise PlanError(
            f"phase {phase} asks for more tokens than its sources have left within their "
            f"max_epochs: they can fill {share:.1%} of it",
            hint="shorten the phase, add data, or raise `max_epochs`",
        )
    limited = _limited(wanted, most, rows)
    # No source gets less than a unit, unless it has less.
    small = {name for name in sizes if most[name] * UNITS < rows}
    limited |= small if len(limited | small) < len(sizes) else set()
    free = {name: share for name, share in wanted.items() if name not in limited}
    room = rows - sum((most[name] for name in limited), Fraction(0))
    units = UNITS
    while free and 0 < math.floor(room * units / rows) < FEWEST_UNITS * len(free):
        units *= 10
    whole = math.floor(room * units / rows)
    caps = {name: math.floor(most[name] * units / rows) for name in free}
    shares = {name: Fraction(number, units) for name, number in _whole(free, caps, whole).items()}
    if free:  # what is no whole unit
        roomiest = max(free, key=lambda name: most[name] - shares[name] * rows)
        shares[roomiest] += room / rows - Fraction(whole, units)
    shares |= {name: most[name] / rows for name in limited}
    total = sum(wanted.values())
    return SizeWeights(
        {name: shares[name] for name in sizes},
        [name for name in sizes if name in limited],
        {
            name: max(0, round(wanted[name] / total * rows - float(most[name])))
            for name in sizes
            if name in limited
        },
    )


def _limited(wanted: Mapping[str, float], most: Mapping[str, Fraction], rows: int) -> set[str]:
    """Return the sources that get all they have, so that the others can be in proportion."""
    limited: set[str] = set()
    while True:
        free = [name for name in wanted if name not in limited]
        room = float(rows - sum((most[name] for name in limited), Fraction(0)))
        total = sum(wanted[name] for name in free)
        over = {name for name in free if wanted[name] * room > float(most[name]) * total}
        if not over or len(over) == len(free):
            return limited
        limited |= over


def _whole(wanted: Mapping[str, float], most: Mapping[str, int], room: int) -> dict[str, int]:
    """Return whole units that sum to `room`; a source gets at least one if it has one left."""
    total = sum(wanted.values())
    exact = {name: share * room / total for name, share in wanted.items()}
    units = {name: min(max(1, math.floor(share)), most[name]) for name, share in exact.items()}
    # Rounding leaves some units over, or takes some for sources that got their first one.
    while (short := room - sum(units.values())) > 0:
        below = _by_need(units, exact, lambda name: units[name] < most[name])[:short]
        if not below:  # less than a unit of each is left
            break
        for name in below:
            units[name] += 1
    while (over := sum(units.values()) - room) > 0:
        for name in _by_need(units, exact, lambda name: units[name] > 1)[-over:]:
            units[name] -= 1
    return units


def _by_need(
    units: Mapping[str, int], exact: Mapping[str, float], eligible: Callable[[str], bool]
) -> Sequence[str]:
    """Return the eligible sources, those that are furthest below their exact share first."""
    return sorted(filter(eligible, units), key=lambda name: units[name] - exact[name])


def rule_text(temperature: float, weights: SizeWeights) -> str:
    """Return the rule that has given the weights, for people."""
    rule = "proportional to the sizes of the sources"
    if temperature != 1:
        rule += f" to the power of 1/{temperature:g}"
    if weights.limited:
        rule += f"; max_epochs limits {', '.join(weights.limited)}"
    return rule
