"""Weights from source sizes: `proportional`, `{temperature: 1.5}`.

Shares are proportional to tokens ** (1 / temperature). A source that would exceed `max_epochs` gets
exactly its remaining rows (supply.py); free sources divide the remainder in the same proportions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...console.errors import PlanError

UNITS = 100_000
"""Shares are multiples of 1/UNITS, five decimals, if `max_epochs` limits no source."""
MIN_UNITS = 1000
"""Minimum units per free source; with fewer, units become ten times finer."""


@dataclass(frozen=True)
class SizeWeights:
    """Shares of a phase, computed from source sizes."""

    shares: Mapping[str, Fraction]
    limited: Sequence[str]
    """Sources that get exactly their remaining rows."""
    left_out: Mapping[str, int]
    """Further rows that a limited source would get without `max_epochs`."""


def size_weights(
    phase: str,
    sizes: Mapping[str, int],
    temperature: float,
    rows: int,
    max_rows: Mapping[str, Fraction],
) -> SizeWeights:
    """Compute the shares of a phase with `rows` rows; `max_rows` limits the rows by source."""
    largest = max(sizes.values())
    proportions = {source: (size / largest) ** (1 / temperature) for source, size in sizes.items()}
    if sum(max_rows.values()) < rows:
        share = float(sum(max_rows.values()) / rows)
        raise PlanError(
            f"phase {phase} asks for more tokens than its sources have left within their "
            f"max_epochs: they can fill {share:.1%} of it",
            hint="shorten the phase, add data, or raise `max_epochs`",
        )
    limited = _find_limited(proportions, max_rows, rows)
    # Every source gets at least a unit, unless it has less.
    small = {source for source in sizes if max_rows[source] * UNITS < rows}
    limited |= small if len(limited | small) < len(sizes) else set()
    free = {source: share for source, share in proportions.items() if source not in limited}
    free_rows = rows - sum((max_rows[source] for source in limited), Fraction(0))
    units = UNITS
    while free and 0 < math.floor(free_rows * units / rows) < MIN_UNITS * len(free):
        units *= 10
    num_units = math.floor(free_rows * units / rows)
    max_units = {source: math.floor(max_rows[source] * units / rows) for source in free}
    shares = {
        source: Fraction(count, units)
        for source, count in _apportion_units(free, max_units, num_units).items()
    }
    if free:  # the fraction of a unit goes to the source with the most rows to spare
        receiver = max(free, key=lambda source: max_rows[source] - shares[source] * rows)
        shares[receiver] += free_rows / rows - Fraction(num_units, units)
    shares |= {source: max_rows[source] / rows for source in limited}
    total = sum(proportions.values())
    return SizeWeights(
        {source: shares[source] for source in sizes},
        [source for source in sizes if source in limited],
        {
            source: max(0, round(proportions[source] / total * rows - float(max_rows[source])))
            for source in sizes
            if source in limited
        },
    )


def _find_limited(
    proportions: Mapping[str, float], max_rows: Mapping[str, Fraction], rows: int
) -> set[str]:
    """Find the sources whose proportional share exceeds their rows, until none does."""
    limited: set[str] = set()
    while True:
        free = [source for source in proportions if source not in limited]
        free_rows = float(rows - sum((max_rows[source] for source in limited), Fraction(0)))
        total = sum(proportions[source] for source in free)
        exceeding = {
            source
            for source in free
            if proportions[source] * free_rows > float(max_rows[source]) * total
        }
        if not exceeding or len(exceeding) == len(free):
            return limited
        limited |= exceeding


def _apportion_units(
    proportions: Mapping[str, float], max_units: Mapping[str, int], num_units: int
) -> dict[str, int]:
    """Apportion `num_units` in proportion; every source gets at least one, up to `max_units`."""
    total = sum(proportions.values())
    exact = {source: share * num_units / total for source, share in proportions.items()}
    units = {
        source: min(max(1, math.floor(share)), max_units[source]) for source, share in exact.items()
    }
    # Rounding down leaves units to assign; minimums of one may have assigned too many.
    while (deficit := num_units - sum(units.values())) > 0:
        receivers = _sort_by_need(units, exact, lambda source: units[source] < max_units[source])
        if not receivers:  # no source has a whole unit left
            break
        for source in receivers[:deficit]:
            units[source] += 1
    while (excess := sum(units.values()) - num_units) > 0:
        for source in _sort_by_need(units, exact, lambda source: units[source] > 1)[-excess:]:
            units[source] -= 1
    return units


def _sort_by_need(
    units: Mapping[str, int], exact: Mapping[str, float], eligible: Callable[[str], bool]
) -> Sequence[str]:
    """Sort the eligible sources, furthest below their exact units first."""
    return sorted(filter(eligible, units), key=lambda source: units[source] - exact[source])


def describe_rule(temperature: float, weights: SizeWeights) -> str:
    """Describe the rule behind the weights, for people."""
    rule = "proportional to the sizes of the sources"
    if temperature != 1:
        rule += f" to the power of 1/{temperature:g}"
    if weights.limited:
        rule += f"; max_epochs limits {', '.join(weights.limited)}"
    return rule
