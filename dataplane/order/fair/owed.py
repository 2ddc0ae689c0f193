"""The rows owed to every source under constant or linearly changing shares, exactly.

After n rows, source i is owed X_i(n) rows, the sum of its shares so far. Its j-th row is a job. Row
p (from 0) may serve the job if this leaves the source less than one row off, before and after the
row: X_i(p) < j and X_i(p + 1) > j - 1. So a job's first and last row, `release` and `due`, follow
from the crossings of whole numbers.

Within a line, X_i is a quadratic function with integer coefficients. A crossing is computed in
floating point, then corrected by the sign of an exact integer. This integer is computed modulo
2 ** 64, which is exact for small values, as near a root; with larger coefficients, in Python's
integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import Int32, Int64

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]
Sources = Int32 | Int64
MAX_INT64_UNIT = 1 << 60
BATCH_JOBS = 1 << 13
"""Jobs per pass: intermediate results take many times their memory."""


@dataclass(frozen=True)
class Line:
    """Rows over which shares change linearly: an integer per source, with equal sums."""

    rows: int
    start: tuple[int, ...]
    end: tuple[int, ...]


class OwedCurve:
    """The rows owed within a line: X(n) = (offset + slope * n + bend * n ** 2) / unit."""

    def __init__(self, line: Line, owed: Sequence[Fraction]) -> None:
        """`owed`: rows owed before the line, by source."""
        start, end = np.array(line.start, object), np.array(line.end, object)
        self.rows, total = line.rows, sum(line.start)
        factor = 2 * line.rows if line.start != line.end else 1
        self.unit = total * factor
        self.dtype: type = np.int64 if self.unit * 4 < MAX_INT64_UNIT else object
        self.slope, self.bend = start * factor, end - start
        scaled = [rows * self.unit for rows in owed]
        self.offset = np.array([value.__floor__() for value in scaled], object)
        self.is_exact = np.array([value.denominator == 1 for value in scaled], bool)
        """True where the offset is no rounded number."""
        self.owed = np.array([float(rows) for rows in owed])
        self._slope, self._bend, self._offset = (
            _narrow(values, self.dtype) for values in (self.slope, self.bend, self.offset)
        )
        self._unit = wrap(self.unit, self.dtype)
        self._float_slope, self._float_bend = self.slope.astype(float), self.bend.astype(float)

    def whole_rows(self, n: int) -> tuple[Int64, Bools]:
        """Return the whole rows owed after n rows of the line, and where a fraction is owed too."""
        value = self.offset + self.slope * n + self.bend * (n * n)
        floors = value // self.unit
        return floors.astype(np.int64), (value != floors * self.unit) | ~self.is_exact

    def exact_rows(self, n: int, owed: Sequence[Fraction]) -> list[Fraction]:
        """Return the rows owed after n rows of the line; `owed` as in the constructor."""
        gains = self.slope * n + self.bend * (n * n)
        return [rows + Fraction(gain, self.unit) for rows, gain in zip(owed, gains, strict=True)]

    def cross(self, sources: Sources, jobs: Int64) -> tuple[Int64, Bools]:
        """Find the last n with at most `jobs` rows owed, and where it is exactly so many."""
        slope, bend = self._float_slope[sources] / 2, self._float_bend[sources]
        target = (jobs - self.owed[sources]) * float(self.unit)
        root = np.sqrt(np.maximum(slope * slope + bend * target, 0))
        guess = np.rint(target / np.maximum(slope + root, 0.5))
        n = np.clip(guess, 0, self.rows).astype(np.int64)
        is_exact = self.is_exact[sources]
        excess = self._difference(sources, jobs, n)
        high = np.flatnonzero((excess > 0) | ((excess == 0) & ~is_exact))
        while high.size:
            n[high] -= 1
            excess[high] = self._difference(sources[high], jobs[high], n[high])
            high = high[(excess[high] > 0) | ((excess[high] == 0) & ~is_exact[high])]
        low = np.flatnonzero(n < self.rows)
        while low.size:
            next_excess = self._difference(sources[low], jobs[low], n[low] + 1)
            may_grow = (next_excess < 0) | ((next_excess == 0) & is_exact[low])
            low, next_excess = low[may_grow], next_excess[may_grow]
            n[low] += 1
            excess[low] = next_excess
            low = low[n[low] < self.rows]
        return n, (excess == 0) & is_exact

    def _difference(self, sources: Sources, jobs: Int64, n: Int64) -> Numbers:
        """Compute (X(n) - jobs) * unit, rounded down."""
        wide: Numbers = n.astype(self.dtype)
        owed = self._offset[sources] + (self._slope[sources] + self._bend[sources] * wide) * wide
        difference: Numbers = owed - jobs.astype(self.dtype) * self._unit
        return difference


def _in_batches(compute: Callable[[Sources, Int64], Int64], sources: Sources, jobs: Int64) -> Int64:
    """Compute the rows of jobs batch by batch."""
    rows = np.empty(len(jobs), np.int64)
    for first in range(0, len(jobs), BATCH_JOBS):
        batch = slice(first, first + BATCH_JOBS)
        rows[batch] = compute(sources[batch], jobs[batch])
    return rows


def wrap(value: int, dtype: type) -> int:
    """Wrap an integer as int64 does, modulo 2 ** 64; unchanged for Python's integers."""
    if dtype is object:
        return value
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _narrow(values: Numbers, dtype: type) -> Numbers:
    return np.array([wrap(value, dtype) for value in values.tolist()], dtype)


class OwedRows:
    """The rows owed to every source over consecutive lines."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = tuple(lines)
        self.num_sources = len(lines[0].start)
        self.first_rows = [0, *accumulate(line.rows for line in lines)]
        self.rows = self.first_rows[-1]
        owed = [Fraction(0)] * self.num_sources
        self.curves, self.starts, ends = [], [], []
        for line in lines:
            curve = OwedCurve(line, owed)
            self.curves.append(curve)
            self.starts.append(owed)
            owed = curve.exact_rows(line.rows, owed)
            ends.append(curve.whole_rows(line.rows))
        self._whole_at_end = np.stack([floors for floors, _ in ends])
        self._fraction_at_end = np.stack([has_fraction for _, has_fraction in ends])

    def whole_rows(self, n: int) -> tuple[Int64, Bools]:
        """Return the whole rows owed after n rows, and where a fraction is owed too."""
        line, first_row = self._line_at(n)
        return self.curves[line].whole_rows(n - first_row)

    def exact_rows(self, n: int) -> list[Fraction]:
        """Return the rows owed after n rows, by source."""
        line, first_row = self._line_at(n)
        return self.curves[line].exact_rows(n - first_row, self.starts[line])

    def exact_source_rows(self, source: int, n: int) -> Fraction:
        """Return the rows owed to a source after n rows."""
        line, first_row = self._line_at(n)
        curve, n = self.curves[line], n - first_row
        gain = curve.slope[source] * n + curve.bend[source] * (n * n)
        return self.starts[line][source] + Fraction(gain, curve.unit)

    def release(self, sources: Sources, jobs: Int64) -> Int64:
        """Return the first row that may serve a job: more than the earlier jobs becomes owed."""
        return _in_batches(self._release, sources, jobs)

    def due(self, sources: Sources, jobs: Int64) -> Int64:
        """Return the last row that may serve a job; the number of rows if no line reaches it."""
        return _in_batches(self._due, sources, jobs)

    def _release(self, sources: Sources, jobs: Int64) -> Int64:
        ends, has_fraction = self._whole_at_end[:, sources], self._fraction_at_end[:, sources]
        jobs_before = jobs - 1
        exceeds = (ends > jobs_before) | ((ends == jobs_before) & has_fraction)
        return self._cross(np.argmax(exceeds, axis=0), sources, jobs_before)[0]

    def _due(self, sources: Sources, jobs: Int64) -> Int64:
        reached = self._whole_at_end[:, sources] >= jobs
        ever = reached.any(axis=0)
        rows = np.full(len(jobs), self.rows, np.int64)
        n, is_exact = self._cross(np.argmax(reached[:, ever], axis=0), sources[ever], jobs[ever])
        rows[ever] = n - is_exact
        return rows

    def _cross(self, lines: Int64, sources: Sources, jobs: Int64) -> tuple[Int64, Bools]:
        rows, is_exact = np.empty(len(jobs), np.int64), np.empty(len(jobs), bool)
        for line in np.unique(lines).tolist():
            chosen = lines == line
            n, is_exact[chosen] = self.curves[line].cross(sources[chosen], jobs[chosen])
            rows[chosen] = n + self.first_rows[line]
        return rows, is_exact

    def _line_at(self, n: int) -> tuple[int, int]:
        """Return the number and the first row of the line that holds row n."""
        line = max(line for line in range(len(self.lines)) if self.first_rows[line] <= n)
        return line, self.first_rows[line]
