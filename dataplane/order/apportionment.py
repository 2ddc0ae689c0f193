"""Assign each row to a source, by Tijdeman's chairman assignment over segments of constant weights.

After n rows, source i is owed X_i(n) rows: the sum of its shares so far. Its j-th row is a job,
released when X_i reaches j - 1 + d and due when X_i reaches j - d, where d = 1 / (2k - 2) for k
sources. Serving the earliest deadline first keeps every |taken - owed| below one row, at every n,
for any change of weights. The weights of all segments are known, so a deadline may lie in a later
segment.

A source may end a segment with a debt of nearly a row, and have no weight in the next. The bound
requires that it gets this row there. No source without weight gets a row otherwise.

The assignment is simulated row by row until it repeats (simulation.py), so that any row is O(1).

Where the row length changes, debts are carried in tokens. A debt below one long row may be several
short rows, which are then served first. So while lengths grow, every debt stays below the longest
row so far; where they shrink, rare plans exceed this bound slightly.

A plan that continues a run has a fair order instead (`Plan.fair` chooses).
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
    """Assigns every row to a source, as one of the source's draws: its rows, numbered from 0."""

    def __init__(self, segments: Sequence[Segment], tables: Tables | None = None) -> None:
        """Simulate the segments, unless their `tables` were kept."""
        self.segments = tuple(segments)
        self.num_sources = len(segments[0].weights)
        self.tables = tables or simulate(self.segments)[0]
        self.bounds = [0, *accumulate(segment.rows for segment in self.segments)]
        """First row by segment, then the number of rows."""

    @property
    def rows(self) -> int:
        return self.bounds[-1]

    def locate(self, rows: Int64) -> tuple[npt.NDArray[np.int32], Int64]:
        """Return, by row, the source, and the draw: the number of earlier rows with this source."""
        sources = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        table_ids = np.searchsorted(self.tables.firsts, rows, side="right") - 1
        for table_id in np.unique(table_ids):
            mask = table_ids == table_id
            repeat = self.tables[table_id]
            turn, entry = np.divmod(rows[mask] - repeat.first, len(repeat.table))
            source = repeat.table[entry]
            sources[mask] = source
            draws[mask] = (
                repeat.before[source] + turn * repeat.per_table[source] + repeat.rank[entry]
            )
        return sources, draws

    def locate_draws(self, source: int, draws: Int64) -> Int64:
        """Return the rows of a source's draws; for draws after its last row, `self.rows`."""
        rows = np.full(len(draws), self.rows, np.int64)
        table_ids = np.searchsorted(self.tables.before[:, source], draws, side="right") - 1
        for table_id in np.unique(table_ids):
            repeat = self.tables[table_id]
            per_table = int(repeat.per_table[source])
            if not per_table:  # no later table has the source either
                continue
            mask = table_ids == table_id
            turn, rank = np.divmod(draws[mask] - repeat.before[source], per_table)
            entries = np.flatnonzero(repeat.table == source)
            table_rows = repeat.first + turn * len(repeat.table) + entries[rank]
            in_table = table_rows < repeat.first + repeat.rows
            rows[mask] = np.where(in_table, table_rows, self.rows)
        return rows

    def counts(self, row: int) -> Int64:
        """Count the rows [0, row) by source."""
        if row == 0:
            return np.zeros(self.num_sources, np.int64)
        table_id = int(np.searchsorted(self.tables.firsts, row - 1, side="right")) - 1
        repeat = self.tables[table_id]
        turn, entry = divmod(row - repeat.first, len(repeat.table))
        begun_turn = np.bincount(repeat.table[:entry], minlength=self.num_sources)
        counts: Int64 = repeat.before + turn * repeat.per_table + begun_turn
        return counts

    approximate_counts = counts

    def debts(self, row: int) -> list[Fraction]:
        """Compute the tokens owed after the rows [0, row), by source."""
        owed, counts = [Fraction(0)] * self.num_sources, self.counts(0)
        for segment, (first_row, end_row) in zip(self.segments, pairwise(self.bounds), strict=True):
            end = min(end_row, row)
            if end <= first_row:
                break
            counts_before, counts = counts, self.counts(end)
            taken = (counts - counts_before).tolist()
            owed = debts_after(segment, owed, end - first_row, taken)
        return owed
