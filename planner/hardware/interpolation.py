"""Interpolation of a table of rates: rows at points, asked for at any point.

Rows are grouped by their first coordinate. The two groups around the asked value are interpolated
by the other coordinates in the same way, and then between each other: the logarithm of the rate is
linear in log(1 + coordinate). A row's own point returns its rate. Beyond the first and the last
value of a coordinate the rate is that of the nearest value: nothing is extrapolated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

Point = tuple[float, ...]


@dataclass(frozen=True)
class At:
    """A rate at a point."""

    point: Point
    rate: float
    source: str


@dataclass(frozen=True)
class Found:
    """An interpolated rate, the sources of the rows behind it, and if the point is outside."""

    rate: float
    sources: tuple[str, ...]
    outside: bool = False


class Table:
    """Rows, grouped by the coordinate `axis`. Of several rows at one point the last counts."""

    def __init__(self, rows: Sequence[At], axis: int = 0) -> None:
        def value(row: At) -> float:
            return row.point[axis]

        ordered = sorted(rows, key=value)
        groups = [(number, list(each)) for number, each in groupby(ordered, value)]
        last = axis + 1 == len(rows[0].point)
        self.values = [number for number, _ in groups]
        self.below: list[Table | Found] = [
            Found(each[-1].rate, (each[-1].source,)) if last else Table(each, axis + 1)
            for _, each in groups
        ]

    def at(self, point: Point) -> Found:
        """Return the rate at `point`."""
        asked, *others = point
        high = min(bisect_left(self.values, asked), len(self.values) - 1)
        low = high if self.values[high] <= asked else max(high - 1, 0)
        found = self._group(low, tuple(others))
        outside = not self.values[0] <= asked <= self.values[-1]
        if low == high:
            return Found(found.rate, found.sources, found.outside or outside)
        above = self._group(high, tuple(others))
        first, last = math.log1p(self.values[low]), math.log1p(self.values[high])
        part = (math.log1p(asked) - first) / (last - first)
        rate = math.exp((1 - part) * math.log(found.rate) + part * math.log(above.rate))
        sources = tuple(dict.fromkeys((*found.sources, *above.sources)))
        return Found(rate, sources, found.outside or above.outside)

    def _group(self, position: int, point: Point) -> Found:
        below = self.below[position]
        return below.at(point) if isinstance(below, Table) else below
