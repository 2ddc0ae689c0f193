"""Simulate the chairman assignment row by row, until it repeats.

In a long segment of integer weights with sum W the debts repeat after W rows. The assignment is
therefore a settling table, a table that repeats, and a closing table: any row is O(1).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .tables import Tables, TablesBuilder, ranks_of

Numbers = npt.NDArray[Any]
"""Integers: of 64 bits, or Python's where those are too short."""

NEVER = 1 << 62
SAFE = 4
"""Sums of a few debts must fit into 64 bits."""
CLOSING_TABLES = 3
"""Tables before an edge that are written out: deadlines reach at most two tables ahead."""
MOST_TABLES = CLOSING_TABLES + 3
"""Tables of a segment that are simulated, at most: up to two that settle, and the closing ones."""


@dataclass(frozen=True)
class Segment:
    """Rows of one length with constant integer weights, one for each source of the plan."""

    rows: int
    weights: tuple[int, ...]
    row_tokens: int

    @cached_property
    def period(self) -> int:
        return sum(self.weights)


def most_simulated(segments: Sequence[Segment]) -> int:
    """Return an upper estimate of the rows that `simulate` assigns one by one."""
    return sum(min(segment.rows, MOST_TABLES * segment.period) for segment in segments)


def simulate(segments: Sequence[Segment]) -> tuple[Tables, Fraction]:
    """Return the tables of the segments' rows, and the largest debt in tokens at any row."""
    sources = len(segments[0].weights)
    tables, largest = TablesBuilder(sources), Fraction(0)
    owed, unit = [0] * sources, 1
    """Tokens in multiples of 1/unit: integers are several times faster than fractions."""
    for position, segment in enumerate(segments):
        before = tables.counts
        largest = max(largest, _assign(segments, position, owed, unit, tables))
        taken = (tables.counts - before).tolist()
        coarser, unit = unit, math.lcm(unit, segment.period)
        row = segment.row_tokens * unit
        gain = row // segment.period * segment.rows
        owed = [
            debt * (unit // coarser) + weight * gain - count * row
            for debt, weight, count in zip(owed, segment.weights, taken, strict=True)
        ]
        largest = max(largest, Fraction(max(owed), unit))
    return tables.finish(), largest


def debts_after(
    segment: Segment, owed: Sequence[Fraction], rows: int, taken: Sequence[int]
) -> list[Fraction]:
    """Return the tokens that each source is owed after the first `rows` rows of a segment."""
    return [
        debt + segment.row_tokens * (Fraction(weight * rows, segment.period) - count)
        for debt, weight, count in zip(owed, segment.weights, taken, strict=True)
    ]


def _assign(
    segments: Sequence[Segment], position: int, owed: list[int], unit: int, tables: TablesBuilder
) -> Fraction:
    """Append the tables of a segment; return the largest debt in tokens before any of its rows."""
    segment = segments[position]
    steps = _Simulation(segments, position, owed, unit)
    period = segment.period
    settling: list[int] = []
    while segment.rows - steps.row > (CLOSING_TABLES + 1) * period:
        table, counts = steps.run(period)
        if counts != list(segment.weights):
            settling += table
            continue
        # The debts equal those of one period ago: from here on the table repeats.
        more = (segment.rows - steps.row) // period - CLOSING_TABLES
        steps.skip(more)
        tables.append(settling, len(settling))
        tables.append(table, period * (1 + more))
        settling = []
        break
    closing = settling + steps.run(segment.rows - steps.row)[0]
    tables.append(closing, len(closing))
    return Fraction(steps.largest_debt, steps.unit) * segment.row_tokens


class _Simulation:
    """Assigns the rows of one segment in order, in exact integers.

    All debts are multiplied by `unit`: a row is `unit`, the slack d is `slack`. The releases and
    deadlines of many jobs are computed together; only the queue goes from row to row.
    """

    def __init__(
        self, segments: Sequence[Segment], position: int, owed: list[int], owed_unit: int
    ) -> None:
        """`owed`: tokens in multiples of 1/owed_unit."""
        self.segments, self.position = segments, position
        segment, sources = segments[position], len(owed)
        whole = segment.row_tokens * owed_unit
        shared = math.gcd(whole, *owed)
        common = math.lcm(segment.period, whole // shared)
        doubled = max(2, 2 * sources - 2)
        self.unit, self.slack = common * doubled, common
        scale = self.unit // (whole // shared)
        most = self.unit * (2 * min(segment.rows, MOST_TABLES * segment.period) + segment.rows + 9)
        self.dtype: type = np.int64 if most * SAFE < NEVER else object
        self.gain = self._array(
            weight * (self.unit // segment.period) for weight in segment.weights
        )
        self.entry = self._array(debt // shared * scale for debt in owed)
        self.taken = np.zeros(sources, np.int64)
        self.row = 0
        self.largest_debt = 0

    def run(self, rows: int) -> tuple[list[int], list[int]]:
        """Return the sources of the next rows, and the number of rows of each source."""
        keys, released = self._jobs(rows)
        sources, queue, first = len(self.taken), list[int](), 0
        assigned = []
        for last in released:  # the jobs [first, last) are released with this row
            for key in keys[first:last]:
                heapq.heappush(queue, key)
            first = last
            assigned.append(heapq.heappop(queue) % sources)
        self._note_debts(np.array(assigned, np.int64))
        gained = np.bincount(assigned, minlength=sources)
        self.taken += gained
        self.row += rows
        return assigned, gained.tolist()

    def skip(self, periods: int) -> None:
        """Advance as if the last period were repeated `periods` more times."""
        segment = self.segments[self.position]
        self.row += periods * segment.period
        self.taken += periods * np.array(segment.weights)

    def _array(self, values: Iterable[int]) -> Numbers:
        return np.array(list(values), self.dtype)

    def _jobs(self, rows: int) -> tuple[list[int], list[int]]:
        """Return the jobs that are released within the next rows, in the order of their release,
        and for each row the number of jobs that are released by then.

        A job is the number (deadline, source): deadline * sources + source.
        """
        last = self.row + rows
        # debt: that of the source, if it gets no more rows. A job is released when the debt
        # reaches the slack, and each earlier job of the source takes `unit` off it.
        debt = self.entry - self.taken.astype(self.dtype) * self.unit
        counts = np.maximum((debt + last * self.gain - self.slack) // self.unit + 1, 0)
        sources, ranks = _numbered(counts.astype(np.int64))
        debt = debt[sources] - ranks.astype(self.dtype) * self.unit
        gain = self.gain[sources]
        growing = gain > 0
        releases = np.full(len(sources), self.row, np.int64)
        releases[growing] = -((debt[growing] - self.slack) // gain[growing])
        keys = self._deadlines(sources, debt) * len(self.taken) + sources
        releases = np.maximum(releases, self.row + 1)
        order = np.argsort(releases, kind="stable")
        released = np.searchsorted(releases[order], np.arange(self.row + 1, last + 1), side="right")
        return keys[order].tolist(), released.tolist()

    def _deadlines(self, sources: Int64, debt: Numbers) -> Numbers:
        """Return the first row at which each debt exceeds 1 - d without the source's next row."""
        rows, gain = self.segments[self.position].rows, self.gain[sources]
        due = (self.unit - self.slack - debt) // np.maximum(gain, 1) + 1
        later = np.flatnonzero((gain == 0) | (due > rows))
        # A deadline times the number of sources may exceed 64 bits.
        deadlines: Numbers = due.astype(object)
        at_end = debt[later] + rows * gain[later]
        for place, source, owed in zip(
            later.tolist(), sources[later].tolist(), at_end.tolist(), strict=True
        ):
            deadlines[place] = rows + self._later_deadline(source, owed)
        return deadlines

    def _note_debts(self, assigned: Int64) -> None:
        """Note the largest debt: that of a source is largest just before it gets a row."""
        before = self.taken[assigned] + ranks_of(assigned, len(self.taken))
        rows: Numbers = np.arange(self.row, self.row + len(assigned)).astype(self.dtype)
        owed = self.entry[assigned] + rows * self.gain[assigned]
        debts = owed - before.astype(self.dtype) * self.unit
        self.largest_debt = max(self.largest_debt, int(debts.max(initial=0)))

    def _later_deadline(self, source: int, debt: int) -> int:
        """Return the deadline, counted from the segment's end, where the debt is `debt`."""
        passed = 0
        longest = self.segments[self.position].row_tokens
        tokens, parts = debt * longest, self.unit
        """The debt in tokens is tokens / parts."""
        for segment in self.segments[self.position + 1 :]:
            longest = max(longest, segment.row_tokens)
            gain = segment.weights[source] * segment.row_tokens
            if gain:
                room = longest * (self.unit - self.slack) * parts - tokens * self.unit
                due = room * segment.period // (gain * self.unit * parts) + 1
                if due <= segment.rows:
                    return passed + due
            tokens = tokens * segment.period + gain * segment.rows * parts
            parts *= segment.period
            passed += segment.rows
        return NEVER


def _numbered(counts: Int64) -> tuple[Int64, Int64]:
    """Return (source, number) of counts[source] numbered things of each source."""
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources, np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
