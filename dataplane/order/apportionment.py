"""Who is served at row n: Tijdeman's chairman assignment, over segments of constant weights.

Each source i is owed X_i(n) rows after n rows: the sum of its shares so far. Its j-th row is a job
that may start when X_i reaches j - 1 + d and must be done when X_i passes j - d, where
d = 1 / (2k - 2) for k sources; taking at each row the job that is due first keeps every
|taken - owed| below one row, at every n, for weights that change in any way. Deadlines look past
the end of a segment, because what is owed there is known too.

A source whose weight ends with a debt of most of a row may be served that row after the edge: the
bound asks for it. No source without weight is served otherwise.

Inside a long segment of integer weights with sum W the debts come back after W rows, so the
assignment is a settling table, a table that repeats, and a closing table: any row is O(1).

Where the length of rows changes, debts are carried in tokens. Just after an edge to shorter rows
a debt of under one long row may be several short ones, and is worked off first. So the bound is
one row of the longest so far while lengths grow; where they shrink, rare plans reach a little more.

Debts that come from elsewhere may be more than anyone can keep within a row: of two sources that
are owed 0.9 rows each and share what comes evenly, one is owed 1.4 after the next row. `carried`
takes as much of them as can be kept.
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
"""Deadlines reach at most two tables ahead, so this many before an edge are written out."""


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
"""Debts are carried whole, or so many eighths of them."""


@dataclass(frozen=True)
class Piece:
    """Rows [first, first + rows) are `table` over and over.

    `before[i]` counts source i's rows before the piece, `rank[r]` those of table[r]'s source before
    r in the table.
    """

    first: int
    rows: int
    table: npt.NDArray[np.int32]
    rank: Int64
    before: Int64
    each: Int64
    """What one table gives each source."""


class Assignment:
    """The source of every row, and which of that source's rows it is."""

    def __init__(
        self, segments: Sequence[Segment], debts: Sequence[Fraction] | None = None
    ) -> None:
        """`debts` are tokens owed at the start; their sum is zero."""
        self.segments = tuple(segments)
        self.sources = len(segments[0].weights)
        self.pieces: list[Piece] = []
        self.most_owed = Fraction(0)
        """The most tokens that a source was owed at any row."""
        self.edges: list[int] = [0]
        owed = list(debts) if debts is not None else [Fraction(0)] * self.sources
        self.edge_debts: list[list[Fraction]] = [owed]
        self._before = np.zeros(self.sources, np.int64)
        for position in range(len(self.segments)):
            owed = self._assign(position, owed)
            self.most_owed = max(self.most_owed, *owed)
            self.edges.append(self.edges[-1] + self.segments[position].rows)
            self.edge_debts.append(owed)
        self._firsts = np.array([piece.first for piece in self.pieces], np.int64)

    @property
    def rows(self) -> int:
        return self.edges[-1]

    def locate(self, rows: Int64) -> tuple[npt.NDArray[np.int32], Int64]:
        """For each row its source, and how many rows that source had before it."""
        sources = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        where = np.searchsorted(self._firsts, rows, side="right") - 1
        for position in np.unique(where):
            chosen = where == position
            piece = self.pieces[position]
            turn, place = np.divmod(rows[chosen] - piece.first, len(piece.table))
            source = piece.table[place]
            sources[chosen] = source
            draws[chosen] = piece.before[source] + turn * piece.each[source] + piece.rank[place]
        return sources, draws

    def rows_of(self, source: int, draws: Int64) -> Int64:
        """The row of each of a source's draws; one past the last row where there is none."""
        found = np.full(len(draws), self.rows, np.int64)
        before = np.array([piece.before[source] for piece in self.pieces], np.int64)
        where = np.searchsorted(before, draws, side="right") - 1
        for position in np.unique(where):
            piece = self.pieces[position]
            each = int(piece.each[source])
            if not each:  # only after the last draw: no later piece has another
                continue
            chosen = where == position
            turn, rank = np.divmod(draws[chosen] - piece.before[source], each)
            places = np.flatnonzero(piece.table == source)
            rows = piece.first + turn * len(piece.table) + places[rank]
            found[chosen] = np.where(rows < piece.first + piece.rows, rows, self.rows)
        return found

    def counts(self, row: int) -> Int64:
        """How many of the rows [0, row) each source has."""
        if row == 0:
            return np.zeros(self.sources, np.int64)
        position = int(np.searchsorted(self._firsts, row - 1, side="right")) - 1
        piece = self.pieces[position]
        turn, place = divmod(row - piece.first, len(piece.table))
        part = np.bincount(piece.table[:place], minlength=self.sources)
        counted: Int64 = piece.before + turn * piece.each + part
        return counted

    def debts(self, row: int) -> list[Fraction]:
        """The tokens that each source is owed after `row` rows."""
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
            # Every debt is what it was a period ago: from here on the table repeats.
            more = (segment.rows - steps.row) // period - CLOSING_TABLES
            steps.skip(more)
            self._append(settling, len(settling))
            self._append(table, period * (1 + more))
            settling = []
            break
        closing = settling + steps.run(segment.rows - steps.row)[0]
        most = Fraction(steps.most_owed, steps.unit) * segment.row_tokens
        self.most_owed = max(self.most_owed, most)
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
        each = np.bincount(table, minlength=self.sources).astype(np.int64)
        rank = np.empty(len(table), np.int64)
        rank[order] = np.arange(len(table)) - np.repeat(np.cumsum(each) - each, each)
        first = self.pieces[-1].first + self.pieces[-1].rows if self.pieces else 0
        self.pieces.append(Piece(first, rows, table, rank, self._before, each))
        self._before = self._before + rows // len(table) * each


def carried(segments: Sequence[Segment], debts: Sequence[Fraction]) -> list[Fraction]:
    """As much of these debts as leaves every source within a row at every row; none, if need be."""
    longest = max(segment.row_tokens for segment in segments)
    for eighths in range(CARRIED, 0, -1):
        part = [debt * eighths / CARRIED for debt in debts]
        if min(part) > -longest and Assignment(segments, part).most_owed < longest:
            return part
    return [Fraction(0)] * len(debts)


class _Simulation:
    """Serves one segment row by row, in exact integers.

    All debts are multiplied by `unit`, so that a row is `unit` and the slack d is `slack`.
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
        self.most_owed = 0
        self.ready: list[tuple[int, int]] = []
        """A heap of deadlines, each with its source."""
        self.waiting: dict[int, list[int]] = {}
        """By the row from which on they may be served: the sources that may not yet."""
        for source in range(sources):
            self._queue(source)

    def run(self, rows: int) -> tuple[list[int], list[int]]:
        """The sources of the next rows, and how many each source has of them."""
        served = []
        before = list(self.taken)
        for _ in range(rows):
            self.row += 1
            for source in self.waiting.pop(self.row, ()):
                heapq.heappush(self.ready, (self._deadline(source), source))
            source = heapq.heappop(self.ready)[1]
            served.append(source)
            # A source is owed most just before it is served.
            owed = self.entry[source] + (self.row - 1) * self.gain[source]
            self.most_owed = max(self.most_owed, owed - self.taken[source] * self.unit)
            self.taken[source] += 1
            self._queue(source)
        gained = [now - then for now, then in zip(self.taken, before, strict=True)]
        return served, gained

    def skip(self, periods: int) -> None:
        """Go on as if the last period had been served `periods` times more."""
        segment = self.segments[self.position]
        self.row += periods * segment.period
        for source, weight in enumerate(segment.weights):
            self.taken[source] += periods * weight
        self.ready, self.waiting = [], {}
        for source in range(len(self.taken)):
            self._queue(source)

    def _queue(self, source: int) -> None:
        """Line up a source's next row, if it has one in this segment."""
        gain = self.gain[source]
        short = self.slack + self.taken[source] * self.unit - self.entry[source]
        owed_in_full = NEVER if short > 0 else self.row
        release = -(-short // gain) if gain else owed_in_full
        if release <= self.row:
            heapq.heappush(self.ready, (self._deadline(source), source))
        else:
            self.waiting.setdefault(release, []).append(source)

    def _deadline(self, source: int) -> int:
        """The first row at which source would be owed more than 1 - d without its next row."""
        segment = self.segments[self.position]
        limit = self.unit - self.slack
        debt = self.entry[source] - self.taken[source] * self.unit
        if self.gain[source]:
            due = (limit - debt) // self.gain[source] + 1
            if due <= segment.rows:
                return due
        return segment.rows + self._later_deadline(source, debt + segment.rows * self.gain[source])

    def _later_deadline(self, source: int, debt: int) -> int:
        """The deadline counted from the segment's end, where the debt is `debt`."""
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
