"""The source of row n: Tijdeman's chairman assignment, over segments of constant weights.

After n rows, source i is owed X_i(n) rows: the sum of its shares so far. Its j-th row is a job with
release X_i = j - 1 + d and deadline X_i = j - d, where d = 1 / (2k - 2) for k sources. Taking the
job with the earliest deadline at each row keeps every |taken - owed| below one row, at every n,
for any change of weights. Deadlines may lie beyond the end of a segment, because the debts there
are known as well.

A source whose weight ends with a debt of most of a row may get that row after the edge: the bound
requires it. Otherwise no source without weight gets a row.

The assignment is simulated row by row until it repeats (simulation.py), so that any row is O(1).

Where the row length changes, debts are carried in tokens. Just after an edge to shorter rows, a
debt below one long row may be several short ones, which are served first. So the bound is one row
of the longest so far while lengths grow; where they shrink, rare plans exceed it slightly.

A plan that continues a run is a fair order instead (`Plan.fair` has the choice).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .simulation import Segment, debts_after, simulate
from .tables import Tables


class Assignment:
    """The source of every row, and the number of the row among that source's rows."""

    def __init__(self, segments: Sequence[Segment], tables: Tables | None = None) -> None:
        """Pass the `tables` of these segments if they exist."""
        self.segments = tuple(segments)
        self.sources = len(segments[0].weights)
        self.tables = tables or simulate(self.segments)[0]
        self.edges = [0, *accumulate(segment.rows for segment in self.segments)]

    @property
    def rows(self) -> int:
        return self.edges[-1]

    def locate(self, rows: Int64) -> tuple[npt.NDArray[np.int32], Int64]:
        """Return for each row its source, and the number of earlier rows of that source."""
        sources = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        where = np.searchsorted(self.tables.firsts, rows, side="right") - 1
        for position in np.unique(where):
            chosen = where == position
            repeat = self.tables[position]
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
        before = self.tables.before[:, source]
        where = np.searchsorted(before, draws, side="right") - 1
        for position in np.unique(where):
            repeat = self.tables[position]
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
        position = int(np.searchsorted(self.tables.firsts, row - 1, side="right")) - 1
        repeat = self.tables[position]
        turn, place = divmod(row - repeat.first, len(repeat.table))
        part = np.bincount(repeat.table[:place], minlength=self.sources)
        counts: Int64 = repeat.before + turn * repeat.per_table + part
        return counts

    def debts(self, row: int) -> list[Fraction]:
        """Return the tokens that each source is owed after `row` rows."""
        owed, before = [Fraction(0)] * self.sources, self.counts(0)
        for segment, (first, last) in zip(self.segments, pairwise(self.edges), strict=True):
            end = min(last, row)
            if end <= first:
                break
            counts = self.counts(end)
            owed = debts_after(segment, owed, end - first, (counts - before).tolist())
            before = counts
        return owed
