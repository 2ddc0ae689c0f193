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
from itertools import groupby

Point = tuple[float, ...]


class RateTable:
    """Rates (point, rate) grouped by coordinate number `axis`. At equal points the last counts."""

    def __init__(self, rates: Sequence[tuple[Point, float]], axis: int = 0) -> None:
        def value(row: tuple[Point, float]) -> float:
            return row[0][axis]

        ordered = sorted(rates, key=value)
        groups = {coordinate: list(group) for coordinate, group in groupby(ordered, value)}
        is_last_axis = axis + 1 == len(rates[0][0])
        self.values = list(groups)
        self.groups: list[RateTable | float] = [
            group[-1][1] if is_last_axis else RateTable(group, axis + 1)
            for group in groups.values()
        ]

    def interpolate(self, point: Point) -> float:
        """Return the rate at a point; `point[0]` belongs to this table's axis."""
        value, *remaining = point
        high = min(bisect_left(self.values, value), len(self.values) - 1)
        low = high if self.values[high] <= value else max(high - 1, 0)
        lower = self._interpolate_group(low, tuple(remaining))
        if low == high:
            return lower
        upper = self._interpolate_group(high, tuple(remaining))
        start, end = math.log1p(self.values[low]), math.log1p(self.values[high])
        weight = (math.log1p(value) - start) / (end - start)
        return math.exp((1 - weight) * math.log(lower) + weight * math.log(upper))

    def _interpolate_group(self, position: int, point: Point) -> float:
        group = self.groups[position]
        return group.interpolate(point) if isinstance(group, RateTable) else group


def find_ranges(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the smallest and the largest value of every coordinate."""
    return [(min(values), max(values)) for values in zip(*points, strict=True)]
