"""Simulate the chairman assignment row by row, until it repeats.

In a long segment of integer weights with sum W the debts repeat after W rows. The assignment is
therefore a settling table, a table that repeats, and a closing table: any row is O(1).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .tables import Tables, TablesBuilder

NEVER = 1 << 62
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

    @property
    def period(self) -> int:
        return sum(self.weights)


def most_simulated(segments: Sequence[Segment]) -> int:
    """Return an upper estimate of the rows that `simulate` assigns one by one."""
    return sum(min(segment.rows, MOST_TABLES * segment.period) for segment in segments)


def simulate(segments: Sequence[Segment], debts: Sequence[Fraction]) -> tuple[Tables, Fraction]:
    """Return the tables of the segments' rows, and the largest debt in tokens at any row.

    `debts`: tokens that each source is owed at the start; their sum is zero.
    """
    tables, largest = TablesBuilder(len(debts)), Fraction(0)
    unit = math.lcm(*(debt.denominator for debt in debts))
    owed = [int(debt * unit) for debt in debts]
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

    All debts are multiplied by `unit`: a row is `unit`, the slack d is `slack`.
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
        self.gain = [weight * (self.unit // segment.period) for weight in segment.weights]
        scale = self.unit // (whole // shared)
        self.entry = [debt // shared * scale for debt in owed]
        self.taken = [0] * sources
        self.row = 0
        self.largest_debt = 0
        self.ready: list[tuple[int, int]] = []
        """Heap of (deadline, source)."""
        self.waiting: dict[int, list[int]] = {}
        """Sources whose next row is not released yet, by the row of the release."""
        for source in range(sources):
            self._queue(source)

    def run(self, rows: int) -> tuple[list[int], list[int]]:
        """Return the sources of the next rows, and the number of rows of each source."""
        assigned = []
        before = list(self.taken)
        for _ in range(rows):
            self.row += 1
            for source in self.waiting.pop(self.row, ()):
                heapq.heappush(self.ready, (self._deadline(source), source))
            source = heapq.heappop(self.ready)[1]
            assigned.append(source)
            # The debt of a source is largest just before it gets a row.
            owed = self.entry[source] + (self.row - 1) * self.gain[source]
            self.largest_debt = max(self.largest_debt, owed - self.taken[source] * self.unit)
            self.taken[source] += 1
            self._queue(source)
        gained = [now - then for now, then in zip(self.taken, before, strict=True)]
        return assigned, gained

    def skip(self, periods: int) -> None:
        """Advance as if the last period were repeated `periods` more times."""
        segment = self.segments[self.position]
        self.row += periods * segment.period
        for source, weight in enumerate(segment.weights):
            self.taken[source] += periods * weight
        self.ready, self.waiting = [], {}
        for source in range(len(self.taken)):
            self._queue(source)

    def _queue(self, source: int) -> None:
        """Queue a source's next row, if it has one in this segment."""
        gain = self.gain[source]
        short = self.slack + self.taken[source] * self.unit - self.entry[source]
        owed_in_full = NEVER if short > 0 else self.row
        release = -(-short // gain) if gain else owed_in_full
        if release <= self.row:
            heapq.heappush(self.ready, (self._deadline(source), source))
        else:
            self.waiting.setdefault(release, []).append(source)

    def _deadline(self, source: int) -> int:
        """Return the first row at which the debt exceeds 1 - d without the source's next row."""
        segment = self.segments[self.position]
        limit = self.unit - self.slack
        debt = self.entry[source] - self.taken[source] * self.unit
        if self.gain[source]:
            due = (limit - debt) // self.gain[source] + 1
            if due <= segment.rows:
                return due
        return segment.rows + self._later_deadline(source, debt + segment.rows * self.gain[source])

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
