"""The source of row n for shares that no small table holds: constant shares with many decimals, and
changing shares. Every source is off by less than one row, at every row.

A source's j-th row is a job with a first and a last row that may serve it (owed.py). Serving every
job within this window keeps all sources less than a row off. Jobs are either slow, owed over more
than a block of N rows, or fast. X_S(n), the rows owed to slow jobs, is rounded to the nearest
integer: where it grows, row n serves a slow job, else a fast one.

    Both groups can keep to their windows. At most X(b) - X(a) jobs of a group have their windows
    within the rows (a, b]. The group gets more than X(b) - X(a) - 1 of these rows, because its
    count is within half a row of X; both numbers are integers, so there is a row for every such
    job. By Hall's theorem all jobs can be served in time, and serving the earliest due first does
    so.

- Slow jobs are few: they are assigned once (slow_jobs.py).
- Fast jobs are assigned block by block, without the earlier blocks. Where a block begins, let the
  state be the set of served fast jobs, among those that both sides may serve. The state at a
  block's end comes from a dry run over the block, which starts from the state that serves the
  earliest due. No fast job is older than a block, so the rows can also lead there from the state in
  which the block really begins: the end of the dry run over the block before.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ...arrays import Int32, Int64
from ...freed import trim_heap
from .owed import Bools, OwedRows
from .slow_jobs import SlowJobs, serve_earliest_due

MAX_BLOCKS = 2
"""Blocks in memory, up to 2 MB each. A reader and its prefetcher use two."""
MAX_BLOCK_EDGES = 4
BATCH_JOBS = 1 << 13
"""Jobs per pass: intermediate results take many times their memory."""


@dataclass(frozen=True, eq=False)
class AssignedBlock:
    """The assignment of consecutive rows."""

    first_row: int
    sources: Int32
    """Source by row."""
    ranks: Int32
    """Earlier rows with this source in the block."""
    before: Int64
    """Rows before the block, by source."""

    def draws(self, rows: Int64) -> Int64:
        """Count all earlier rows with the same source, for rows of the block."""
        draws: Int64 = self.before[self.sources[rows]] + self.ranks[rows]
        return draws


BlockCache = OrderedDict[tuple["FairOrder", int], AssignedBlock]


class FairOrder:
    """Assigns every row to a source, as one of the source's draws."""

    def __init__(self, owed: OwedRows, slow: SlowJobs, cache: BlockCache | None = None) -> None:
        """`cache`: blocks in memory, shared by several orders."""
        self.owed, self.slow = owed, slow
        self.num_blocks = max(1, owed.rows // slow.block)
        self._cache = OrderedDict() if cache is None else cache
        self._served_at_edge: OrderedDict[int, Bools] = OrderedDict()

    @property
    def rows(self) -> int:
        return self.owed.rows

    @property
    def num_sources(self) -> int:
        return self.owed.num_sources

    def locate(self, rows: Int64) -> tuple[Int32, Int64]:
        """Return, by row, the source, and the earlier rows with this source."""
        sources, draws = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        numbers = self._block_numbers(rows)
        for number in np.unique(numbers).tolist():
            chosen, block = numbers == number, self._block(number)
            rows_in_block = rows[chosen] - block.first_row
            sources[chosen] = block.sources[rows_in_block]
            draws[chosen] = block.draws(rows_in_block)
        return sources, draws

    def locate_draws(self, source: int, draws: Int64) -> Int64:
        """Locate the rows of a source's draws; `rows` for draws beyond the last row."""
        located = np.full(len(draws), self.rows, np.int64)
        pending = np.flatnonzero(draws < self.counts(self.rows)[source])
        sources, jobs = np.full(len(pending), source), draws[pending] + 1
        is_slow, slow_numbers = self.slow.ranges.find(sources, jobs)
        located[pending[is_slow]] = self.slow.rows[slow_numbers[is_slow]]
        pending, sources, jobs = pending[~is_slow], sources[~is_slow], jobs[~is_slow]
        release_blocks = self._block_numbers(self.owed.release(sources, jobs))
        due_blocks = self._block_numbers(self.owed.due(sources, jobs))
        for number in np.unique(np.concatenate([release_blocks, due_blocks])).tolist():
            block = self._block(number)
            rows = np.flatnonzero(block.sources == source)
            if not len(rows):
                continue
            candidates = pending[(release_blocks == number) | (due_blocks == number)]
            block_draws = block.draws(rows)
            index = np.searchsorted(block_draws, draws[candidates])
            index = np.minimum(index, len(rows) - 1)
            in_block = block_draws[index] == draws[candidates]
            located[candidates[in_block]] = block.first_row + rows[index[in_block]]
        return located

    def counts(self, row: int) -> Int64:
        """Count the rows [0, row) by source."""
        if row in (0, self.rows):
            return self._counts_at_edge(0 if row == 0 else self.num_blocks)
        block = self._block(int(self._block_numbers(np.array([row]))[0]))
        sources = block.sources[: row - block.first_row]
        counts: Int64 = block.before + np.bincount(sources, minlength=self.num_sources)
        return counts

    def _block_numbers(self, rows: Int64) -> Int64:
        """Return the blocks of rows. The last block is the longest: no shorter one follows."""
        return np.minimum(rows // self.slow.block, self.num_blocks - 1)

    def _edge(self, number: int) -> int:
        return self.rows if number == self.num_blocks else number * self.slow.block

    def _block(self, number: int) -> AssignedBlock:
        block = self._cache.get((self, number))
        if block is None:
            block = self._assign(number)
            trim_heap()
            self._cache[self, number] = block
            while len(self._cache) > MAX_BLOCKS:
                self._cache.popitem(last=False)
        with suppress(KeyError):  # another thread may have just dropped it
            self._cache.move_to_end((self, number))
        return block

    def _assign(self, number: int) -> AssignedBlock:
        first_row, end_row = self._edge(number), self._edge(number + 1)
        sources, ranks = (np.empty(end_row - first_row, np.int32) for _ in range(2))
        before = self._counts_at_edge(number)
        slow_rows, slow_sources, slow_jobs = self.slow.served_between(first_row, end_row)
        sources[slow_rows - first_row] = slow_sources
        ranks[slow_rows - first_row] = slow_jobs - 1 - before[slow_sources]
        fast_rows = _complement(slow_rows, first_row, end_row)
        # The jobs that this block serves, neither before it nor after its end.
        fast_sources, jobs = self._fast_jobs(first_row, end_row, self._served(number))
        floors, _ = self.owed.whole_rows(end_row)
        crosses_end = jobs > floors[fast_sources]
        keep = ~crosses_end | self._served(number + 1)[fast_sources]
        fast_sources, jobs = fast_sources[keep], jobs[keep]
        order = self._serve(fast_rows, fast_sources, jobs, first_row, end_row - 1)
        assert len(order) == len(jobs), "every job of the block is served in it"
        served_sources = fast_sources[order]
        sources[fast_rows - first_row] = served_sources
        ranks[fast_rows - first_row] = jobs[order] - 1 - before[served_sources]
        return AssignedBlock(first_row, sources, ranks, before)

    def _served(self, number: int) -> Bools:
        """Return, where block `number` begins, the sources whose current job is fast and served."""
        if number in (0, self.num_blocks):
            return np.zeros(self.num_sources, bool)
        served = self._served_at_edge.get(number)
        if served is None:
            served = self._dry_run(number - 1)
            self._served_at_edge[number] = served
            while len(self._served_at_edge) > MAX_BLOCK_EDGES:
                self._served_at_edge.popitem(last=False)
        return served

    def _dry_run(self, number: int) -> Bools:
        """Run dry over a block; returns the sources whose job at its end is fast and served."""
        first_row, end_row = self._edge(number), self._edge(number + 1)
        slow_rows, _, _ = self.slow.served_between(first_row, end_row)
        rows = _complement(slow_rows, first_row, end_row)
        sources, jobs = self._fast_jobs(first_row, end_row, self._earliest_due_served(first_row))
        order = self._serve(rows, sources, jobs, first_row)
        floors, _ = self.owed.whole_rows(end_row)
        served = np.zeros(self.num_sources, bool)
        served_sources, served_jobs = sources[order], jobs[order]
        served[served_sources[served_jobs > floors[served_sources]]] = True
        return served

    def _earliest_due_served(self, row: int) -> Bools:
        """Return the sources whose current fast job is served before `row`, if the earliest due
        are."""
        floors, has_fraction = self.owed.whole_rows(row)
        sources = np.flatnonzero(has_fraction)
        is_slow, _ = self.slow.ranges.find(sources, floors[sources] + 1)
        sources = sources[~is_slow]
        num_served = row - self.slow.count_served(row) - int(self.slow.count_fast(floors).sum())
        due = self.owed.due(sources, floors[sources] + 1)
        served = np.zeros(self.num_sources, bool)
        served[sources[np.lexsort((sources, due))[:num_served]]] = True
        return served

    def _fast_jobs(self, first_row: int, end_row: int, served: Bools) -> tuple[Int32, Int64]:
        """List the unserved fast jobs that the rows [first_row, end_row) may serve."""
        floors, _ = self.owed.whole_rows(first_row)
        end_floors, has_fraction = self.owed.whole_rows(end_row)
        counts = end_floors + has_fraction - floors
        ends = np.cumsum(counts)
        starts = ends - counts
        all_sources, all_jobs = np.empty(ends[-1], np.int32), np.empty(ends[-1], np.int64)
        size = 0
        for first in range(0, len(all_jobs), BATCH_JOBS):
            numbers = np.arange(first, min(first + BATCH_JOBS, len(all_jobs)))
            sources = np.searchsorted(ends, numbers, side="right")
            ranks = numbers - starts[sources]
            jobs = floors[sources] + 1 + ranks
            is_slow, _ = self.slow.ranges.find(sources, jobs)
            keep = np.flatnonzero(~is_slow & ~(served[sources] & (ranks == 0)))
            batch = slice(size, size + len(keep))
            all_sources[batch], all_jobs[batch] = sources[keep], jobs[keep]
            size = batch.stop
        return all_sources[:size], all_jobs[:size]

    def _serve(
        self, rows: Int64, sources: Int32, jobs: Int64, first_row: int, last_row: int | None = None
    ) -> Int32:
        """Assign a job to every row of a block from `first_row`, all due by `last_row`; returns job
        indices by row."""
        release = np.maximum(self.owed.release(sources, jobs), first_row) - first_row
        due = self.owed.due(sources, jobs)
        due = due if last_row is None else np.minimum(due, last_row)
        return serve_earliest_due(rows - first_row, release.astype(np.int32), due - first_row)

    def _counts_at_edge(self, number: int) -> Int64:
        """Count the rows before block `number` by source."""
        row = self._edge(number)
        floors, has_fraction = self.owed.whole_rows(row)
        counts = floors + self._served(number)
        sources = np.flatnonzero(has_fraction)
        is_slow, numbers = self.slow.ranges.find(sources, floors[sources] + 1)
        counts[sources[is_slow]] += self.slow.rows[numbers[is_slow]] < row
        return counts


def _complement(rows: Int64, first_row: int, end_row: int) -> Int64:
    """Return the rows of [first_row, end_row) that are not among `rows`."""
    is_free = np.ones(end_row - first_row, bool)
    is_free[rows - first_row] = False
    return np.flatnonzero(is_free) + first_row
