"""The rows that each source is owed, when shares are constant or change linearly: exact.

After n rows, source i is owed X_i(n) rows, the sum of its shares so far. Its j-th row is a job. It
may be served in row p (from 0) if that leaves the source less than one row off, before and after
the row: X_i(p) < j and X_i(p + 1) > j - 1. So the first and last row of a job follow from the
crossings of whole numbers: `release` and `due`.

Within a line, X_i is a quadratic function with integer coefficients. A crossing is computed in
floating point, then corrected by the sign of an exact integer. That is computed modulo 2 ** 64,
which is exact where it is small, as it is near a root; with larger coefficients, in Python's
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
WIDEST = 1 << 60
PART = 1 << 13
"""Jobs that are computed on at once: intermediate results take many times their memory."""


@dataclass(frozen=True)
class Line:
    """Rows over which the share of each source changes linearly, in integers of equal sums."""

    rows: int
    start: tuple[int, ...]
    end: tuple[int, ...]


class Piece:
    """The owed rows within a line: X(n) = (offset + slope * n + bend * n ** 2) / unit."""

    def __init__(self, line: Line, owed: Sequence[Fraction]) -> None:
        start, end = np.array(line.start, object), np.array(line.end, object)
        self.rows, total = line.rows, sum(line.start)
        changing = line.start != line.end
        factor = 2 * line.rows if changing else 1
        self.unit = total * factor
        widest = self.unit * 4
        self.dtype: type = np.int64 if widest < WIDEST else object
        self.slope, self.bend = start * factor, end - start
        scaled = [debt * self.unit for debt in owed]
        self.offset = np.array([value.__floor__() for value in scaled], object)
        self.whole = np.array([value.denominator == 1 for value in scaled], bool)
        self.owed = np.array([float(value) for value in owed])
        self._slope, self._bend, self._offset = (
            _narrow(values, self.dtype) for values in (self.slope, self.bend, self.offset)
        )
        self._unit = modulo(self.unit, self.dtype)
        self._slope_f, self._bend_f = self.slope.astype(float), self.bend.astype(float)

    def at(self, n: int) -> tuple[Int64, Bools]:
        """Return the whole rows owed after n rows of the line, and where more than that is."""
        value = self.offset + self.slope * n + self.bend * (n * n)
        floors = value // self.unit
        return floors.astype(np.int64), (value != floors * self.unit) | ~self.whole

    def owed_at(self, n: int, owed: Sequence[Fraction]) -> list[Fraction]:
        gain = self.slope * n + self.bend * (n * n)
        return [before + Fraction(more, self.unit) for before, more in zip(owed, gain, strict=True)]

    def cross(self, sources: Sources, jobs: Int64) -> tuple[Int64, Bools]:
        """Return the last row count at which at most `jobs` rows are owed, and where exactly."""
        slope, bend = self._slope_f[sources] / 2, self._bend_f[sources]
        target = (jobs - self.owed[sources]) * float(self.unit)
        root = np.sqrt(np.maximum(slope * slope + bend * target, 0))
        guess = np.rint(target / np.maximum(slope + root, 0.5))
        n = np.clip(guess, 0, self.rows).astype(np.int64)
        exact = self.whole[sources]
        behind = self._difference(sources, jobs, n)
        low = np.flatnonzero((behind > 0) | ((behind == 0) & ~exact))
        while low.size:
            n[low] -= 1
            behind[low] = self._difference(sources[low], jobs[low], n[low])
            low = low[(behind[low] > 0) | ((behind[low] == 0) & ~exact[low])]
        high = np.flatnonzero(n < self.rows)
        while high.size:
            ahead = self._difference(sources[high], jobs[high], n[high] + 1)
            may = (ahead < 0) | ((ahead == 0) & exact[high])
            high, ahead = high[may], ahead[may]
            n[high] += 1
            behind[high] = ahead
            high = high[n[high] < self.rows]
        return n, (behind == 0) & exact

    def _difference(self, sources: Sources, jobs: Int64, n: Int64) -> Numbers:
        """Return (X(n) - jobs) * unit, rounded down."""
        wide: Numbers = n.astype(self.dtype)
        owed = self._offset[sources] + (self._slope[sources] + self._bend[sources] * wide) * wide
        difference: Numbers = owed - jobs.astype(self.dtype) * self._unit
        return difference


def _in_parts(rows: Callable[[Sources, Int64], Int64], sources: Sources, jobs: Int64) -> Int64:
    """Return the rows that a function gives for jobs, computed part by part."""
    found = np.empty(len(jobs), np.int64)
    for first in range(0, len(jobs), PART):
        part = slice(first, first + PART)
        found[part] = rows(sources[part], jobs[part])
    return found


def modulo(value: int, dtype: type) -> int:
    """Return an integer as one of this type: modulo 2 ** 64, or unchanged."""
    if dtype is object:
        return value
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _narrow(values: Numbers, dtype: type) -> Numbers:
    return np.array([modulo(value, dtype) for value in values.tolist()], dtype)


class Owed:
    """The rows that each source is owed over consecutive lines."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = tuple(lines)
        self.sources = len(lines[0].start)
        self.firsts = [0, *accumulate(line.rows for line in lines)]
        self.rows = self.firsts[-1]
        owed = [Fraction(0)] * self.sources
        self.pieces, self.starts, ends = [], [], []
        for line in lines:
            piece = Piece(line, owed)
            self.pieces.append(piece)
            self.starts.append(owed)
            owed = piece.owed_at(line.rows, owed)
            ends.append(piece.at(line.rows))
        self._whole_at_end = np.stack([floors for floors, _ in ends])
        self._more_at_end = np.stack([more for _, more in ends])

    def at(self, n: int) -> tuple[Int64, Bools]:
        """Return the whole rows that each source is owed after n rows, and where more is owed."""
        piece, first = self._piece_at(n)
        return self.pieces[piece].at(n - first)

    def exactly(self, n: int) -> list[Fraction]:
        """Return the rows that each source is owed after n rows."""
        piece, first = self._piece_at(n)
        return self.pieces[piece].owed_at(n - first, self.starts[piece])

    def exactly_of(self, source: int, n: int) -> Fraction:
        """Return the rows that a source is owed after n rows."""
        number, first = self._piece_at(n)
        piece, n = self.pieces[number], n - first
        gain = piece.slope[source] * n + piece.bend[source] * (n * n)
        return self.starts[number][source] + Fraction(gain, piece.unit)

    def release(self, sources: Sources, jobs: Int64) -> Int64:
        """Return the first row that may serve each job: the one in which more than the jobs before
        it become owed."""
        return _in_parts(self._release, sources, jobs)

    def due(self, sources: Sources, jobs: Int64) -> Int64:
        """Return the last row that may serve each job; the number of rows if no line reaches it."""
        return _in_parts(self._due, sources, jobs)

    def _release(self, sources: Sources, jobs: Int64) -> Int64:
        ends, more = self._whole_at_end[:, sources], self._more_at_end[:, sources]
        before = jobs - 1
        over = (ends > before) | ((ends == before) & more)
        return self._cross(np.argmax(over, axis=0), sources, before)[0]

    def _due(self, sources: Sources, jobs: Int64) -> Int64:
        reached = self._whole_at_end[:, sources] >= jobs
        ever = reached.any(axis=0)
        rows = np.full(len(jobs), self.rows, np.int64)
        n, exact = self._cross(np.argmax(reached[:, ever], axis=0), sources[ever], jobs[ever])
        rows[ever] = n - exact
        return rows

    def _cross(self, pieces: Int64, sources: Sources, jobs: Int64) -> tuple[Int64, Bools]:
        rows, exact = np.empty(len(jobs), np.int64), np.empty(len(jobs), bool)
        for number in np.unique(pieces).tolist():
            chosen = pieces == number
            found, hit = self.pieces[number].cross(sources[chosen], jobs[chosen])
            rows[chosen], exact[chosen] = found + self.firsts[number], hit
        return rows, exact

    def _piece_at(self, n: int) -> tuple[int, int]:
        number = max(number for number in range(len(self.lines)) if self.firsts[number] <= n)
        return number, self.firsts[number]
