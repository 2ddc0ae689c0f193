"""The source of row n: Tijdeman's chairman assignment, over segments of constant weights.

After n rows, source i is owed X_i(n) rows: the sum of its shares so far. Its j-th row is a job with
release X_i = j - 1 + d and deadline X_i = j - d, where d = 1 / (2k - 2) for k sources. Serving
the earliest deadline first keeps every |taken - owed| below one row, at every n, for any change of
weights. Deadlines may lie beyond the end of a segment, as later debts are known too.

A source whose weight ends with a debt of nearly a row may get this row after the edge: the bound
requires it. Otherwise no source without weight gets a row.

The assignment is simulated row by row until it repeats (simulation.py), so that any row is O(1).

Where the row length changes, debts are carried in tokens. Just after an edge to shorter rows, a
debt below one long row may be several short rows, which are served first. So while lengths grow,
the bound is the longest row so far; where they shrink, rare plans exceed it slightly.

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
    """Assigns every row to a source, as one of the source's draws."""

    def __init__(self, segments: Sequence[Segment], tables: Tables | None = None) -> None:
        """Simulate the segments, unless their `tables` exist."""
        self.segments = tuple(segments)
        self.num_sources = len(segments[0].weights)
        self.tables = tables or simulate(self.segments)[0]
        self.edges = [0, *accumulate(segment.rows for segment in self.segments)]

    @property
    def rows(self) -> int:
        return self.edges[-1]

    def locate(self, rows: Int64) -> tuple[npt.NDArray[np.int32], Int64]:
        """Return, by row, the source, and the earlier rows with this source."""
        sources = np.empty(len(rows), np.int32)
        draws = np.empty(len(rows), np.int64)
        numbers = np.searchsorted(self.tables.firsts, rows, side="right") - 1
        for number in np.unique(numbers):
            chosen = numbers == number
            repeat = self.tables[number]
            turn, entry = np.divmod(rows[chosen] - repeat.first, len(repeat.table))
            source = repeat.table[entry]
            sources[chosen] = source
            draws[chosen] = (
                repeat.before[source] + turn * repeat.per_table[source] + repeat.rank[entry]
            )
        return sources, draws

    def locate_draws(self, source: int, draws: Int64) -> Int64:
        """Locate the rows of a source's draws; `rows` for draws beyond the last row."""
        located = np.full(len(draws), self.rows, np.int64)
        numbers = np.searchsorted(self.tables.before[:, source], draws, side="right") - 1
        for number in np.unique(numbers):
            repeat = self.tables[number]
            per_table = int(repeat.per_table[source])
            if not per_table:  # draws beyond the last: no later table has the source
                continue
            chosen = numbers == number
            turn, rank = np.divmod(draws[chosen] - repeat.before[source], per_table)
            entries = np.flatnonzero(repeat.table == source)
            rows = repeat.first + turn * len(repeat.table) + entries[rank]
            located[chosen] = np.where(rows < repeat.first + repeat.rows, rows, self.rows)
        return located

    def counts(self, row: int) -> Int64:
        """Count the rows [0, row) by source."""
        if row == 0:
            return np.zeros(self.num_sources, np.int64)
        number = int(np.searchsorted(self.tables.firsts, row - 1, side="right")) - 1
        repeat = self.tables[number]
        turn, entry = divmod(row - repeat.first, len(repeat.table))
        begun_table = np.bincount(repeat.table[:entry], minlength=self.num_sources)
        counts: Int64 = repeat.before + turn * repeat.per_table + begun_table
        return counts

    def debts(self, row: int) -> list[Fraction]:
        """Compute the tokens owed to each source after `row` rows."""
        owed, counts = [Fraction(0)] * self.num_sources, self.counts(0)
        for segment, (first_row, end_row) in zip(self.segments, pairwise(self.edges), strict=True):
            end = min(end_row, row)
            if end <= first_row:
                break
            counts_before, counts = counts, self.counts(end)
            taken = (counts - counts_before).tolist()
            owed = debts_after(segment, owed, end - first_row, taken)
        return owed
