"""Interpolation of a table of rates at any point.

Rows are grouped by their first coordinate. The groups below and above the queried value are
interpolated over the remaining coordinates in the same way, then between each other: the logarithm
of the rate is linear in log(1 + coordinate). At a row's coordinates the answer is its rate. Outside
the measured range the nearest value answers: nothing is extrapolated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

Point = tuple[float, ...]


@dataclass(frozen=True)
class RatePoint:
    """A measured rate and the coordinates of its row."""

    coordinates: Point
    rate: float
    source: str


@dataclass(frozen=True)
class InterpolatedRate:
    value: float
    sources: tuple[str, ...]
    """Sources of the rows behind the rate."""
    outside: bool = False
    """True beyond the measured coordinates."""


class RateTable:
    """Rows grouped by coordinate number `axis`. At equal coordinates the last row counts."""

    def __init__(self, rows: Sequence[RatePoint], axis: int = 0) -> None:
        def value(row: RatePoint) -> float:
            return row.coordinates[axis]

        ordered = sorted(rows, key=value)
        groups = {coordinate: list(group) for coordinate, group in groupby(ordered, value)}
        is_last_axis = axis + 1 == len(rows[0].coordinates)
        self.values = list(groups)
        self.groups: list[RateTable | InterpolatedRate] = [
            InterpolatedRate(group[-1].rate, (group[-1].source,))
            if is_last_axis
            else RateTable(group, axis + 1)
            for group in groups.values()
        ]

    def interpolate(self, point: Point) -> InterpolatedRate:
        """Return the rate at a point; `point[0]` belongs to this table's axis."""
        value, *remaining = point
        high = min(bisect_left(self.values, value), len(self.values) - 1)
        low = high if self.values[high] <= value else max(high - 1, 0)
        lower = self._interpolate_group(low, tuple(remaining))
        outside = not self.values[0] <= value <= self.values[-1]
        if low == high:
            return InterpolatedRate(lower.value, lower.sources, lower.outside or outside)
        upper = self._interpolate_group(high, tuple(remaining))
        start, end = math.log1p(self.values[low]), math.log1p(self.values[high])
        weight = (math.log1p(value) - start) / (end - start)
        rate = math.exp((1 - weight) * math.log(lower.value) + weight * math.log(upper.value))
        sources = tuple(dict.fromkeys((*lower.sources, *upper.sources)))
        return InterpolatedRate(rate, sources, lower.outside or upper.outside)

    def _interpolate_group(self, position: int, point: Point) -> InterpolatedRate:
        group = self.groups[position]
        return group.interpolate(point) if isinstance(group, RateTable) else group
