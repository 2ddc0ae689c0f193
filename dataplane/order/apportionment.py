"""The source of row n: Tijdeman's chairman assignment, over segments of constant weights.

After n rows, source i is owed X_i(n) rows: the sum of its shares so far. Its j-th row is a job with
release X_i = j - 1 + d and deadline X_i = j - d, where d = 1 / (2k - 2) for k sources. Taking the
job with the earliest deadline at each row keeps every |taken - owed| below one row, at every n,
for any change of weights. Deadlines may lie beyond the end of a segment, because the debts there
are known as well.

A source whose weight ends with a debt of most of a row may get that row after the edge: the bound
requires it. Otherwise no source without weight gets a row.

In a long segment of integer weights with sum W the debts repeat after W rows. The assignment is
therefore a settling table, a table that repeats, and a closing table: any row is O(1).

Where the row length changes, debts are carried in tokens. Just after an edge to shorter rows, a
debt below one long row may be several short ones, which are served first. So the bound is one row
of the longest so far while lengths grow; where they shrink, rare plans exceed it slightly.

Initial debts may be too large for the bound: of two sources that are owed 0.9 rows each and get
equal weights, one is owed 1.4 after the next row. `carried` takes the largest part of the debts
that keeps the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..arrays import Int64

NEVER = 1 << 62
CLOSING_TABLES = 3
"""Tables before an edge that are written out: deadlines reach at most two tables ahead."""


@dataclass(frozen=True)
class Segment:
    """Rows of one length with constant integer weights, one for each source of the plan."""

    rows: int
    weights: tuple[int, ...]
    row_tokens: int

    @property
    def period(self) -> int:
        return sum(self.weights)


CARRIED = 8
"""Debts are carried as a multiple of 1/8 of them."""


@dataclass(frozen=True)
class Repeat:
    """Rows [first, first + rows) repeat `table`.

    `before[i]` counts the rows of source i before `first`; `rank[r]` counts the entries of
    table[r]'s source before r in the table.
    """

    first: int
    rows: int
    table: npt.NDArray[np.int32]
    rank: Int64
    before: Int64
    per_table: Int64
    """Rows of each source in one table."""


class Assignment:
    """The source of every row, and the number of the row among that source's rows."""

    def __init__(
        self, segments: Sequence[Segment], debts: Sequence[Fraction] | None = None
    ) -> None:
        """`debts`: tokens that each source is owed at the start; their sum is zero."""
        self.segments = tuple(segments)
        self.sources = len(segments[0].weights)
        self.repeats: list[Repeat] = []
        self.largest_debt = Fraction(0)
        """Largest debt in tokens of a source at any row."""
        self.edges: list[int] = [0]
        owed = list(debts) if debts is not None else [Fraction(0)] * self.sources
        self.edge_debts: list[list[Fraction]] = [owed]
        self._before = np.zeros(self.sources, np.int64)
        for position in range(len(self.segments)):
            owed = self._assign(position, owed)
            self.largest_debt = max(self.largest_debt, *owed)
            self.edges.append(self.edges[-1] + self.segments[position].rows)
            self.edge_debts.append(owed)
        self._firsts = np.array([repeat.first for repeat in self.repeats], np.int64)

    @property
    def rows(self) -> int:
        return self.edges[-1]

    def locate(self, rows: Int64) -> tuple[npt.NDArray[np.int32], Int64]:
        """Return for each row its source, and the number of earlier rows of that source."""
        sources = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        where = np.searchsorted(self._firsts, rows, side="right") - 1
        for position in np.unique(where):
            chosen = where == position
            repeat = self.repeats[position]
            turn, place = np.divmod(rows[chosen] - repeat.first, len(repeat.table))
            source = repeat.table[place]
            sources[chosen] = source
            draws[chosen] = (
                repeat.before[source] + turn * repeat.per_table[source] + repeat.rank[place]
            )
        return sources, draws

    def rows_of(self, source: int, draws: Int64) -> Int64:
        """Return the row of each of a source's draws; `rows` for draws beyond the last row."""
        matches = np.full(len(draws), self.rows, np.int64)
        before = np.array([repeat.before[source] for repeat in self.repeats], np.int64)
        where = np.searchsorted(before, draws, side="right") - 1
        for position in np.unique(where):
            repeat = self.repeats[position]
            per_table = int(repeat.per_table[source])
            if not per_table:  # only for draws beyond the last: no later table has one
                continue
            chosen = where == position
            turn, rank = np.divmod(draws[chosen] - repeat.before[source], per_table)
            places = np.flatnonzero(repeat.table == source)
            rows = repeat.first + turn * len(repeat.table) + places[rank]
            matches[chosen] = np.where(rows < repeat.first + repeat.rows, rows, self.rows)
        return matches

    def counts(self, row: int) -> Int64:
        """Return the number of rows of each source among [0, row)."""
        if row == 0:
            return np.zeros(self.sources, np.int64)
        position = int(np.searchsorted(self._firsts, row - 1, side="right")) - 1
        repeat = self.repeats[position]
        turn, place = divmod(row - repeat.first, len(repeat.table))
        part = np.bincount(repeat.table[:place], minlength=self.sources)
        counts: Int64 = repeat.before + turn * repeat.per_table + part
        return counts

    def debts(self, row: int) -> list[Fraction]:
        """Return the tokens that each source is owed after `row` rows."""
        position = min(int(np.searchsorted(self.edges, row, side="right")), len(self.segments)) - 1
        segment, first = self.segments[position], self.edges[position]
        taken = self.counts(row) - self.counts(first)
        shares = [Fraction(weight, segment.period) for weight in segment.weights]
        return [
            owed + segment.row_tokens * (share * (row - first) - int(count))
            for owed, share, count in zip(self.edge_debts[position], shares, taken, strict=True)
        ]

    def _assign(self, position: int, owed: list[Fraction]) -> list[Fraction]:
        segment = self.segments[position]
        steps = _Simulation(self.segments, position, owed)
        period, before = segment.period, self._before
        settling: list[int] = []
        while segment.rows - steps.row > (CLOSING_TABLES + 1) * period:
            table, counts = steps.run(period)
            if counts != list(segment.weights):
                settling += table
                continue
            # The debts equal those of one period ago: from here on the table repeats.
            more = (segment.rows - steps.row) // period - CLOSING_TABLES
            steps.skip(more)
            self._append(settling, len(settling))
            self._append(table, period * (1 + more))
            settling = []
            break
        closing = settling + steps.run(segment.rows - steps.row)[0]
        most = Fraction(steps.largest_debt, steps.unit) * segment.row_tokens
        self.largest_debt = max(self.largest_debt, most)
        self._append(closing, len(closing))
        taken = self._before - before
        return [
            debt + segment.row_tokens * (Fraction(weight * segment.rows, period) - int(count))
            for debt, weight, count in zip(owed, segment.weights, taken, strict=True)
        ]

    def _append(self, sources: Sequence[int], rows: int) -> None:
        if not sources:
            return
        table = np.array(sources, np.int32)
        order = np.argsort(table, kind="stable")
        per_table = np.bincount(table, minlength=self.sources).astype(np.int64)
        rank = np.empty(len(table), np.int64)
        rank[order] = np.arange(len(table)) - np.repeat(np.cumsum(per_table) - per_table, per_table)
        first = self.repeats[-1].first + self.repeats[-1].rows if self.repeats else 0
        self.repeats.append(Repeat(first, rows, table, rank, self._before, per_table))
        self._before = self._before + rows // len(table) * per_table


def carried(segments: Sequence[Segment], debts: Sequence[Fraction]) -> list[Fraction]:
    """Return the largest part of the debts that keeps every source within one row; maybe none."""
    longest = max(segment.row_tokens for segment in segments)
    for eighths in range(CARRIED, 0, -1):
        part = [debt * eighths / CARRIED for debt in debts]
        if min(part) > -longest and Assignment(segments, part).largest_debt < longest:
            return part
    return [Fraction(0)] * len(debts)


class _Simulation:
    """Assigns the rows of one segment in order, in exact integers.

    All debts are multiplied by `unit`: a row is `unit`, the slack d is `slack`.
    """

    def __init__(self, segments: Sequence[Segment], position: int, owed: list[Fraction]) -> None:
        self.segments, self.position = segments, position
        segment = segments[position]
        entry = [debt / segment.row_tokens for debt in owed]
        sources = len(entry)
        common = math.lcm(segment.period, *(debt.denominator for debt in entry))
        doubled = max(2, 2 * sources - 2)
        self.unit, self.slack = common * doubled, common
        self.gain = [weight * (self.unit // segment.period) for weight in segment.weights]
        self.entry = [int(debt * self.unit) for debt in entry]
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
        tokens = Fraction(debt, self.unit) * longest
        for segment in self.segments[self.position + 1 :]:
            longest = max(longest, segment.row_tokens)
            limit = longest * (1 - Fraction(self.slack, self.unit))
            gain = Fraction(segment.weights[source] * segment.row_tokens, segment.period)
            if gain:
                due = (limit - tokens) // gain + 1
                if due <= segment.rows:
                    return passed + int(due)
            tokens += gain * segment.rows
            passed += segment.rows
        return NEVER
