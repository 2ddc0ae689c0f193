"""The source of row n for shares that no small table holds: constant ones of many decimals, and
changing ones. Every source is off by less than one row, at every row.

The j-th row of a source is a job with a first and a last row that may serve it (owed.py). Whoever
keeps to these windows is never off by a row. The jobs are divided into slow ones, which are owed
over more than a block of N rows, and fast ones. X_S(n), the slow jobs' part of the rows owed, is
rounded to the nearest whole number: where it grows, row n serves a slow job, else a fast one.

    Both groups can keep to their windows. Jobs that lie wholly within the rows (a, b] make up at
    most X(b) - X(a) of what their group is owed there. The group gets more than X(b) - X(a) - 1
    rows, because its count is within half a row of X; and as both are whole, not fewer than there
    are such jobs. By Hall's theorem they can be served in time, and serving the earliest due first
    does so.

- Slow jobs are few: they are assigned once (slow_jobs.py).
- Fast jobs are assigned block by block, without those before. Where a block begins, let a state be
  the set of fast jobs, among those that may be served on both sides, that have been served. The
  state at a block's end is that of a dry run over the block, from the state at its start in which
  the earliest due are served. No fast job is older than a block, so the rows can also lead there
  from the state in which the block really begins: that at the end of the block before.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ...arrays import Int32, Int64
from ...freed import give_back
from .owed import Bools, Owed
from .slow_jobs import SlowJobs, serve

KEPT_BLOCKS = 2
"""Blocks in memory: 2 MB each if they are the largest. A reader and its prefetcher use two."""
KEPT_ENDS = 4
PART = 1 << 13
"""Jobs that are listed at once: intermediate results take many times their memory."""


@dataclass(frozen=True, eq=False)
class Block:
    """The assignment of consecutive rows."""

    first: int
    sources: Int32
    """Source of each row."""
    ranks: Int32
    """Earlier rows of that source in the block."""
    before: Int64
    """Rows of each source before the block."""

    def draws(self, places: Int64) -> Int64:
        """Return for some rows of the block the number of earlier rows of their source."""
        draws: Int64 = self.before[self.sources[places]] + self.ranks[places]
        return draws


KeptBlocks = OrderedDict[tuple["FairOrder", int], Block]


class FairOrder:
    """The source of every row, and the number of the row among that source's rows."""

    def __init__(self, owed: Owed, slow: SlowJobs, kept: KeptBlocks | None = None) -> None:
        """`kept`: the blocks that several orders keep in memory together."""
        self.owed, self.slow = owed, slow
        self.blocks = max(1, owed.rows // slow.block)
        self._kept = OrderedDict() if kept is None else kept
        self._ends: OrderedDict[int, Bools] = OrderedDict()

    @property
    def rows(self) -> int:
        return self.owed.rows

    @property
    def sources(self) -> int:
        return self.owed.sources

    def locate(self, rows: Int64) -> tuple[Int32, Int64]:
        """Return for each row its source, and the number of earlier rows of that source."""
        sources, draws = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        numbers = self._numbers(rows)
        for number in np.unique(numbers).tolist():
            chosen, block = numbers == number, self._block(number)
            places = rows[chosen] - block.first
            sources[chosen], draws[chosen] = block.sources[places], block.draws(places)
        return sources, draws

    def rows_of(self, source: int, draws: Int64) -> Int64:
        """Return the row of each of a source's draws; `rows` for draws beyond the last row."""
        found = np.full(len(draws), self.rows, np.int64)
        drawn = np.flatnonzero(draws < self.counts(self.rows)[source])
        sources, jobs = np.full(len(drawn), source), draws[drawn] + 1
        slow, numbers = self.slow.find(sources, jobs)
        found[drawn[slow]] = self.slow.rows[numbers[slow]]
        drawn, sources, jobs = drawn[~slow], sources[~slow], jobs[~slow]
        early = self._numbers(self.owed.release(sources, jobs))
        late = self._numbers(self.owed.due(sources, jobs))
        for number in np.unique(np.concatenate([early, late])).tolist():
            block = self._block(number)
            places = np.flatnonzero(block.sources == source)
            wanted = drawn[(early == number) | (late == number)]
            own = block.draws(places)
            at = np.searchsorted(own, draws[wanted])
            at = np.minimum(at, max(len(places) - 1, 0))
            if len(places):
                here = own[at] == draws[wanted]
                found[wanted[here]] = block.first + places[at[here]]
        return found

    def counts(self, row: int) -> Int64:
        """Return the number of rows of each source among [0, row)."""
        if row in (0, self.rows):
            return self._counts_at_edge(0 if row == 0 else self.blocks)
        block = self._block(int(self._numbers(np.array([row]))[0]))
        more = np.bincount(block.sources[: row - block.first], minlength=self.sources)
        counts: Int64 = block.before + more
        return counts

    def _numbers(self, rows: Int64) -> Int64:
        """Return the blocks of rows. The last block is the longest: no shorter one follows."""
        return np.minimum(rows // self.slow.block, self.blocks - 1)

    def _edge(self, number: int) -> int:
        return self.rows if number == self.blocks else number * self.slow.block

    def _block(self, number: int) -> Block:
        block = self._kept.get((self, number))
        if block is None:
            block = self._assign(number)
            give_back()
            self._kept[self, number] = block
            while len(self._kept) > KEPT_BLOCKS:
                self._kept.popitem(last=False)
        with suppress(KeyError):  # another thread may have just dropped it
            self._kept.move_to_end((self, number))
        return block

    def _assign(self, number: int) -> Block:
        first, last = self._edge(number), self._edge(number + 1)
        sources, ranks = (np.empty(last - first, np.int32) for _ in range(2))
        before = self._counts_at_edge(number)
        slow_rows, slow_sources, slow_jobs = self.slow.between(first, last)
        sources[slow_rows - first] = slow_sources
        ranks[slow_rows - first] = slow_jobs - 1 - before[slow_sources]
        fast = _others(slow_rows, first, last)
        # The jobs that are served in this block: neither before it, nor after its end.
        jobs_of, jobs = self._fast_jobs(first, last, self._served(number))
        whole, _ = self.owed.at(last)
        late = jobs > whole[jobs_of]
        keep = ~late | self._served(number + 1)[jobs_of]
        jobs_of, jobs = jobs_of[keep], jobs[keep]
        order = self._serve(fast, jobs_of, jobs, first, last - 1)
        assert len(order) == len(jobs), "every job of the block is served in it"
        served_of = jobs_of[order]
        sources[fast - first] = served_of
        ranks[fast - first] = jobs[order] - 1 - before[served_of]
        return Block(first, sources, ranks, before)

    def _served(self, number: int) -> Bools:
        """Return, where block `number` begins, the sources whose current job is fast and served."""
        if number in (0, self.blocks):
            return np.zeros(self.sources, bool)
        served = self._ends.get(number)
        if served is None:
            served = self._dry_run(number - 1)
            self._ends[number] = served
            while len(self._ends) > KEPT_ENDS:
                self._ends.popitem(last=False)
        return served

    def _dry_run(self, number: int) -> Bools:
        """Return the sources whose job at the end of a block is fast and served by a dry run."""
        first, last = self._edge(number), self._edge(number + 1)
        rows = _others(self.slow.between(first, last)[0], first, last)
        jobs_of, jobs = self._fast_jobs(first, last, self._earliest_served(first))
        order = self._serve(rows, jobs_of, jobs, first)
        whole, _ = self.owed.at(last)
        served = np.zeros(self.sources, bool)
        taken_of, taken = jobs_of[order], jobs[order]
        served[taken_of[taken > whole[taken_of]]] = True
        return served

    def _earliest_served(self, row: int) -> Bools:
        """Return the sources whose current fast job is served before `row`, if the earliest due
        are."""
        whole, more = self.owed.at(row)
        current = np.flatnonzero(more)
        slow, _ = self.slow.find(current, whole[current] + 1)
        current = current[~slow]
        taken = row - self.slow.drawn_before(row) - int(self.slow.fast_until(whole).sum())
        due = self.owed.due(current, whole[current] + 1)
        served = np.zeros(self.sources, bool)
        served[current[np.lexsort((current, due))[:taken]]] = True
        return served

    def _fast_jobs(self, first: int, last: int, served: Bools) -> tuple[Int32, Int64]:
        """Return the fast jobs that may be served in the rows [first, last) and are not yet."""
        whole, _ = self.owed.at(first)
        until, more = self.owed.at(last)
        counts = until + more - whole
        ends = np.cumsum(counts)
        begins = ends - counts
        all_sources, all_jobs = np.empty(ends[-1], np.int32), np.empty(ends[-1], np.int64)
        size = 0
        for start in range(0, len(all_jobs), PART):
            numbers = np.arange(start, min(start + PART, len(all_jobs)))
            sources = np.searchsorted(ends, numbers, side="right")
            ranks = numbers - begins[sources]
            jobs = whole[sources] + 1 + ranks
            slow, _ = self.slow.find(sources, jobs)
            keep = np.flatnonzero(~slow & ~(served[sources] & (ranks == 0)))
            part = slice(size, size + len(keep))
            all_sources[part], all_jobs[part] = sources[keep], jobs[keep]
            size = part.stop
        return all_sources[:size], all_jobs[:size]

    def _serve(
        self, rows: Int64, sources: Int32, jobs: Int64, first: int, last: int | None = None
    ) -> Int32:
        """Assign a job to each row of a block that begins at `first`; all of them are due by
        `last`. Return the jobs' indices, by row."""
        release = (np.maximum(self.owed.release(sources, jobs), first) - first).astype(np.int32)
        due = self.owed.due(sources, jobs)
        due = due if last is None else np.minimum(due, last)
        return serve(rows - first, release, due - first)

    def _counts_at_edge(self, number: int) -> Int64:
        """Return the number of rows of each source before block `number`."""
        row = self._edge(number)
        whole, more = self.owed.at(row)
        counts = whole + self._served(number)
        current = np.flatnonzero(more)
        slow, numbers = self.slow.find(current, whole[current] + 1)
        counts[current[slow]] += self.slow.rows[numbers[slow]] < row
        return counts


def _others(rows: Int64, first: int, last: int) -> Int64:
    """Return the rows of [first, last) that are not among some of them."""
    others = np.ones(last - first, bool)
    others[rows - first] = False
    return np.flatnonzero(others) + first
