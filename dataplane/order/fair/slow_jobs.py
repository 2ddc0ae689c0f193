"""The jobs of slow sources: assigned once for a plan, and looked up.

A job is fast if it lies within rows in which the share of its source is at least 1 / (N - 2), so
that it is owed within a block of N rows; all others are slow. N is the smallest power of two of
some for which slow jobs are few.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from ...arrays import Int32, Int64
from .owed import Bools, Numbers, Owed, Piece, modulo

BLOCKS = tuple(1 << bits for bits in range(10, 19))
"""Rows of a block: a seek assigns up to four blocks."""
FEW = 1 << 21
"""Slow jobs that are assigned once for a plan, at most, unless blocks are the largest; about three
seconds."""
PART = 1 << 12
"""Rows that are served between two conversions to Python's integers."""
SHIFT = 40
HALF = Fraction(1, 2)


@dataclass(frozen=True, eq=False)
class Ranges:
    """The slow jobs of all sources, as ranges of job numbers, by source."""

    first_keys: Int64
    """source << SHIFT | job, of the first job of each range."""
    last_keys: Int64
    before: Int64
    """Slow jobs in the ranges before."""

    @property
    def jobs(self) -> int:
        if not len(self.before):
            return 0
        return int(self.before[-1] + self.last_keys[-1] - self.first_keys[-1] + 1)

    def find(self, sources: Int64, jobs: Int64) -> tuple[Bools, Int64]:
        """Return where jobs are slow, and their number among the slow jobs."""
        if not len(self.before):
            return np.zeros(len(jobs), bool), np.zeros(len(jobs), np.int64)
        keys = (sources << SHIFT) | jobs
        at = np.searchsorted(self.first_keys, keys, side="right") - 1
        slow = (at >= 0) & (keys <= self.last_keys[at])
        return slow, self.before[at] + keys - self.first_keys[at]

    def names(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Return the sources and jobs of slow jobs, by their numbers."""
        at = np.searchsorted(self.before, numbers, side="right") - 1
        keys = self.first_keys[at] + numbers - self.before[at]
        return keys >> SHIFT, keys & ((1 << SHIFT) - 1)


@dataclass(frozen=True, eq=False)
class SlowTable:
    """The slow jobs of some lines, and the rows that serve them."""

    block: Int64
    """[N]: rows of a block."""
    first_keys: Int64
    last_keys: Int64
    before: Int64
    drawn: Int64
    """The rows that serve slow jobs, in order."""
    rows: Int64
    """The row of each slow job; the number of rows if it has none."""
    by_row: Int64
    """The number of the slow job in each row of `drawn`."""

    @property
    def arrays(self) -> dict[str, Int64]:
        return vars(self)


class SlowJobs:
    """The rows of all slow jobs."""

    def __init__(self, owed: Owed, table: SlowTable) -> None:
        self.block, self.sources = int(table.block[0]), owed.sources
        self.ranges = Ranges(table.first_keys, table.last_keys, table.before)
        self.drawn, self.rows, self.by_row = table.drawn, table.rows, table.by_row

    def find(self, sources: Int64, jobs: Int64) -> tuple[Bools, Int64]:
        return self.ranges.find(sources, jobs)

    def between(self, first: int, last: int) -> tuple[Int64, Int64, Int64]:
        """Return the rows among [first, last) that serve slow jobs, with their sources and jobs."""
        low, high = np.searchsorted(self.drawn, [first, last])
        sources, jobs = self.ranges.names(self.by_row[low:high])
        return self.drawn[low:high], sources, jobs

    def drawn_before(self, row: int) -> int:
        return int(np.searchsorted(self.drawn, row))

    def fast_until(self, jobs: Int64) -> Int64:
        """Return how many of the first `jobs` jobs of each source are fast."""
        keys = (np.arange(self.sources) << SHIFT) | jobs
        first, last, before = self.ranges.first_keys, self.ranges.last_keys, self.ranges.before
        if not len(first):
            return jobs
        begun = np.searchsorted(first, keys, side="right")
        slow = np.where(
            begun > 0,
            before[begun - 1] + np.minimum(keys, last[begun - 1]) - first[begun - 1] + 1,
            0,
        )
        at_source = np.searchsorted(first, np.arange(self.sources) << SHIFT)
        total = np.append(before, self.ranges.jobs)
        fast: Int64 = jobs - (slow - total[at_source])
        return fast


def assign(owed: Owed, ranks: Int64 | None = None) -> SlowTable:
    """Choose the rows of a block, and assign the slow jobs.

    Of the jobs that are not due by the last row, those of sources with low `ranks` come first."""
    for block in BLOCKS:
        ranges = slow_ranges(owed, block)
        if ranges.jobs <= FEW:
            break
    drawn = draw_rows(owed, ranges)
    sources, jobs = ranges.names(np.arange(ranges.jobs))
    due = owed.due(sources, jobs)
    if ranks is not None:
        due[due == owed.rows] += ranks[sources[due == owed.rows]]
    order = serve(drawn, owed.release(sources, jobs), due).astype(np.int64)
    rows = np.full(len(jobs), owed.rows, np.int64)
    rows[order] = drawn
    return SlowTable(
        np.array([block]), ranges.first_keys, ranges.last_keys, ranges.before, drawn, rows, order
    )


def slow_ranges(owed: Owed, block: int) -> Ranges:
    """Return the jobs that do not lie within rows of a share above 1 / (block - 1)."""
    firsts, lasts = [], []
    ends, more = owed.at(owed.rows)
    total = ends + more
    fast = _fast_rows(owed, block)
    for source in range(owed.sources):
        next_job = 1
        for begin, end in fast[source]:
            low, high = (owed.exactly_of(source, row) for row in (begin, end))
            first_fast, last_fast = math.ceil(low) + 1, math.floor(high)
            if first_fast > last_fast:
                continue
            if first_fast > next_job:
                firsts.append((source << SHIFT) | next_job)
                lasts.append((source << SHIFT) | (first_fast - 1))
            next_job = last_fast + 1
        if next_job <= total[source]:
            firsts.append((source << SHIFT) | next_job)
            lasts.append((source << SHIFT) | int(total[source]))
    first_keys, last_keys = np.array(firsts, np.int64), np.array(lasts, np.int64)
    counts = last_keys - first_keys + 1
    return Ranges(first_keys, last_keys, np.cumsum(counts) - counts)


def _fast_rows(owed: Owed, block: int) -> list[list[list[int]]]:
    """Return for each source the ranges of rows in which its share is at least 1 / (block - 2)."""
    ranges: list[list[list[int]]] = [[] for _ in range(owed.sources)]
    for line, first in zip(owed.lines, owed.firsts, strict=False):
        total, rows = sum(line.start), line.rows
        for source, (start, end) in enumerate(zip(line.start, line.end, strict=True)):
            # The share after n rows is (start + (end - start) * n / rows) / total.
            low, high = 0, rows
            need = total - start * (block - 2)
            if end == start:
                high = 0 if need > 0 else rows
            elif end > start:
                low = max(0, -(-need * rows // ((end - start) * (block - 2))))
            else:
                high = min(rows, max(0, -need * rows // ((start - end) * (block - 2))))
            if low >= high:
                continue
            known = ranges[source]
            if known and known[-1][1] == first + low:
                known[-1][1] = first + high
            else:
                known.append([first + low, first + high])
    return ranges


def draw_rows(owed: Owed, ranges: Ranges) -> Int64:
    """Return the rows at which the rows owed to slow jobs, rounded to the nearest, grow by one."""
    if not ranges.jobs:
        return np.empty(0, np.int64)
    sources, first = ranges.first_keys >> SHIFT, ranges.first_keys & ((1 << SHIFT) - 1)
    last = ranges.last_keys & ((1 << SHIFT) - 1)
    # After begin <= n < end rows, a part of the range is owed.
    begin = owed.release(sources, first) + 1
    whole, more = owed.at(owed.rows)
    ends = (whole[sources] > last) | ((whole[sources] == last) & more[sources])
    end = np.full(len(last), owed.rows + 1)
    end[ends] = owed.release(sources[ends], last[ends] + 1) + 1
    counts = last - first + 1
    drawn, rows = 0, []
    for number, piece in enumerate(owed.pieces):
        low, high = owed.firsts[number], owed.firsts[number + 1]
        events = np.concatenate([begin, end, [low + 1, high + 1]])
        events = np.unique(events[(events > low) & (events <= high + 1)])
        opened, closed = np.argsort(begin, kind="stable"), np.argsort(end, kind="stable")
        part = _Part(piece, owed.starts[number])
        done = now = shut = 0
        for n1, n2 in pairwise(events.tolist()):
            while now < len(opened) and begin[opened[now]] <= n1:
                one = int(opened[now])
                now += 1
                if end[one] > n1:
                    part.add(int(sources[one]), int(first[one]), 1)
            while shut < len(closed) and end[closed[shut]] <= n1:
                one = int(closed[shut])
                shut += 1
                done += int(counts[one])
                if end[one] > low + 1 and begin[one] < end[one]:
                    part.add(int(sources[one]), int(first[one]), -1)
            total = math.floor(part.at(n2 - 1 - low) + done + HALF)
            if total > drawn:
                wanted = range(drawn + 1 - done, total + 1 - done)
                rows.append(low + part.reach(wanted, n1 - low, n2 - 1 - low) - 1)
                drawn = total
    return np.concatenate([*rows, np.empty(0, np.int64)])


class _Part:
    """The part that some ranges of jobs make up of the rows owed, after n rows of a line."""

    def __init__(self, piece: Piece, starts: Sequence[Fraction]) -> None:
        self.piece, self.starts = piece, starts
        self.bend = self.slope = 0
        self.start = Fraction(0)

    def add(self, source: int, first: int, times: int) -> None:
        """Add the jobs from `first` on of a source; `times` -1 takes them away."""
        self.bend += times * int(self.piece.bend[source])
        self.slope += times * int(self.piece.slope[source])
        self.start += times * (self.starts[source] - (first - 1))

    def at(self, n: int) -> Fraction:
        return self.start + Fraction((self.bend * n + self.slope) * n, self.piece.unit)

    def reach(self, wholes: range, low: int, high: int) -> Int64:
        """Return for each whole number the first of low <= n <= high at which the part, rounded to
        the nearest, reaches it."""
        unit, dtype = self.piece.unit, self.piece.dtype
        base = math.ceil((wholes[0] - HALF - self.start) * unit)
        steps: Numbers = np.arange(len(wholes)).astype(dtype)
        targets = float(base) + np.arange(len(wholes)) * float(unit)
        root = np.sqrt(np.maximum(self.slope**2 / 4 + self.bend * targets, 0))
        guess = np.clip(np.rint(targets / np.maximum(self.slope / 2 + root, 0.5)), low, high)
        n: Int64 = guess.astype(np.int64)
        slope, bend, base, unit = (
            modulo(value, dtype) for value in (self.slope, self.bend, base, unit)
        )

        def short(places: Int64, n: Int64) -> Bools:
            """Return where the part has not reached the number after n rows."""
            wide: Numbers = n.astype(dtype)
            less: Bools = ((bend * wide + slope) * wide - steps[places] * unit - base < 0).astype(
                bool
            )
            return less

        low_places = np.flatnonzero(short(np.arange(len(n)), n))
        while low_places.size:
            n[low_places] += 1
            low_places = low_places[short(low_places, n[low_places])]
        high_places = np.flatnonzero(n > low)
        while high_places.size:
            high_places = high_places[~short(high_places, n[high_places] - 1)]
            n[high_places] -= 1
            high_places = high_places[n[high_places] > low]
        return n


def serve(rows: Int64, release: Int64 | Int32, due: Int64) -> Int32:
    """Assign a job to each row: of those released and not yet served, the one that is due first.
    Return the jobs' indices, by row."""
    order = np.argsort(due, kind="stable").astype(np.int32)
    rank = np.empty(len(due), np.int32)
    rank[order] = np.arange(len(due), dtype=np.int32)
    arrival = np.argsort(release, kind="stable").astype(np.int32)
    ready = np.searchsorted(release[arrival], rows, side="right").astype(np.int32)
    waiting = rank[arrival]
    del arrival, rank
    queue: list[int] = []
    served, first = np.empty(len(rows), np.int32), 0
    for part in range(0, len(rows), PART):  # Python's integers take four times as much memory
        until = ready[part : part + PART].tolist()
        jobs = waiting[first : until[-1]].tolist()
        base, taken = first, []
        for last in until:
            for job in jobs[first - base : last - base]:
                heapq.heappush(queue, job)
            first = last
            taken.append(heapq.heappop(queue))
        served[part : part + PART] = taken
    result = order[served]
    assert (due[result] >= rows).all(), "every job is served while it is within its bounds"
    return result
