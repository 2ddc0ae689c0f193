"""Slow jobs: assigned once for a plan, and looked up.

A job is fast if it lies within rows in which its source has a share of at least 1 / (N - 2), and so
is owed within a block of N rows; all others are slow. N is the smallest number in BLOCKS with few
slow jobs.
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
from .owed import Bools, Numbers, OwedCurve, OwedRows, wrap

BLOCKS = tuple(1 << bits for bits in range(10, 19))
"""Candidate block sizes, in rows: a seek assigns up to four blocks."""
MAX_SLOW_JOBS = 1 << 21
"""Maximum slow jobs, unless blocks are the largest: about three seconds."""
BATCH_ROWS = 1 << 12
"""Rows served between two conversions to Python's integers."""
SHIFT = 40
JOB_MASK = (1 << SHIFT) - 1
HALF = Fraction(1, 2)


@dataclass(frozen=True, eq=False)
class JobRanges:
    """The slow jobs of all sources, as sorted ranges. A job's key is source << SHIFT | job."""

    first_keys: Int64
    """Key of a range's first job."""
    last_keys: Int64
    before: Int64
    """Slow jobs in earlier ranges."""

    @property
    def jobs(self) -> int:
        if not len(self.before):
            return 0
        return int(self.before[-1] + self.last_keys[-1] - self.first_keys[-1] + 1)

    def find(self, sources: Int64, jobs: Int64) -> tuple[Bools, Int64]:
        """Return where jobs are slow, and their numbers among all slow jobs."""
        if not len(self.before):
            return np.zeros(len(jobs), bool), np.zeros(len(jobs), np.int64)
        keys = (sources << SHIFT) | jobs
        ranges = np.searchsorted(self.first_keys, keys, side="right") - 1
        is_slow = (ranges >= 0) & (keys <= self.last_keys[ranges])
        return is_slow, self.before[ranges] + keys - self.first_keys[ranges]

    def identify(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Return the sources and jobs of slow jobs with some numbers."""
        ranges = np.searchsorted(self.before, numbers, side="right") - 1
        keys = self.first_keys[ranges] + numbers - self.before[ranges]
        return keys >> SHIFT, keys & JOB_MASK


@dataclass(frozen=True, eq=False)
class SlowTable:
    """The slow jobs of some lines, and the rows that serve them; the fields are keys on disk."""

    block: Int64
    """[1]: rows in a block."""
    first_keys: Int64
    last_keys: Int64
    before: Int64
    drawn: Int64
    """Rows that serve slow jobs, in order."""
    rows: Int64
    """Row by slow job; the number of rows if none serves it."""
    by_row: Int64
    """Number of the slow job, by row in `drawn`."""

    @property
    def arrays(self) -> dict[str, Int64]:
        return vars(self)


class SlowJobs:
    """The slow jobs of some lines, and the rows that serve them, for look-ups."""

    def __init__(self, owed: OwedRows, table: SlowTable) -> None:
        self.block, self.num_sources = int(table.block[0]), owed.num_sources
        self.ranges = JobRanges(table.first_keys, table.last_keys, table.before)
        self.drawn, self.rows, self.by_row = table.drawn, table.rows, table.by_row

    def served_between(self, first_row: int, end_row: int) -> tuple[Int64, Int64, Int64]:
        """Return the rows in [first_row, end_row) that serve slow jobs, with sources and jobs."""
        low, high = np.searchsorted(self.drawn, [first_row, end_row])
        sources, jobs = self.ranges.identify(self.by_row[low:high])
        return self.drawn[low:high], sources, jobs

    def count_served(self, row: int) -> int:
        """Count the slow jobs served before `row`."""
        return int(np.searchsorted(self.drawn, row))

    def count_fast(self, jobs: Int64) -> Int64:
        """Count the fast jobs among the first jobs[i] jobs of source i."""
        ranges = self.ranges
        if not len(ranges.before):
            return jobs
        source_keys = np.arange(self.num_sources) << SHIFT
        keys = source_keys | jobs
        num_ranges = np.searchsorted(ranges.first_keys, keys, side="right")
        last = num_ranges - 1
        in_last = np.minimum(keys, ranges.last_keys[last]) - ranges.first_keys[last] + 1
        slow_so_far = np.where(num_ranges > 0, ranges.before[last] + in_last, 0)
        totals = np.append(ranges.before, ranges.jobs)
        slow_before_source = totals[np.searchsorted(ranges.first_keys, source_keys)]
        fast: Int64 = jobs - (slow_so_far - slow_before_source)
        return fast


def assign_slow_jobs(owed: OwedRows, ranks: Int64 | None = None) -> SlowTable:
    """Choose the block size, and assign the slow jobs.

    Among jobs that are not due by the last row, sources with low `ranks` come first.
    """
    for block in BLOCKS:
        ranges = find_slow_jobs(owed, block)
        if ranges.jobs <= MAX_SLOW_JOBS:
            break
    drawn = draw_rows(owed, ranges)
    sources, jobs = ranges.identify(np.arange(ranges.jobs))
    due = owed.due(sources, jobs)
    if ranks is not None:
        due[due == owed.rows] += ranks[sources[due == owed.rows]]
    order = serve_earliest_due(drawn, owed.release(sources, jobs), due).astype(np.int64)
    rows = np.full(len(jobs), owed.rows, np.int64)
    rows[order] = drawn
    return SlowTable(
        np.array([block]), ranges.first_keys, ranges.last_keys, ranges.before, drawn, rows, order
    )


def find_slow_jobs(owed: OwedRows, block: int) -> JobRanges:
    """Find the jobs that lie outside the rows with a large share of their source."""
    first_keys, last_keys = [], []
    floors, has_fraction = owed.whole_rows(owed.rows)
    num_jobs = floors + has_fraction
    fast_rows = _find_fast_rows(owed, block)
    for source in range(owed.num_sources):
        next_job = 1
        for row_range in fast_rows[source]:
            low, high = (owed.exact_source_rows(source, row) for row in row_range)
            first_fast, last_fast = math.ceil(low) + 1, math.floor(high)
            if first_fast > last_fast:
                continue
            if first_fast > next_job:
                first_keys.append((source << SHIFT) | next_job)
                last_keys.append((source << SHIFT) | (first_fast - 1))
            next_job = last_fast + 1
        if next_job <= num_jobs[source]:
            first_keys.append((source << SHIFT) | next_job)
            last_keys.append((source << SHIFT) | int(num_jobs[source]))
    first, last = np.array(first_keys, np.int64), np.array(last_keys, np.int64)
    counts = last - first + 1
    return JobRanges(first, last, np.cumsum(counts) - counts)


def _find_fast_rows(owed: OwedRows, block: int) -> list[list[list[int]]]:
    """Find, by source, the row ranges [start, end) with a share of at least 1 / (block - 2)."""
    ranges: list[list[list[int]]] = [[] for _ in range(owed.num_sources)]
    for line, first_row in zip(owed.lines, owed.first_rows, strict=False):
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
            source_ranges = ranges[source]
            if source_ranges and source_ranges[-1][1] == first_row + low:
                source_ranges[-1][1] = first_row + high
            else:
                source_ranges.append([first_row + low, first_row + high])
    return ranges


def draw_rows(owed: OwedRows, ranges: JobRanges) -> Int64:
    """Find the rows at which the rows owed to slow jobs, rounded to the nearest, grow by one."""
    if not ranges.jobs:
        return np.empty(0, np.int64)
    sources, first = ranges.first_keys >> SHIFT, ranges.first_keys & JOB_MASK
    last = ranges.last_keys & JOB_MASK
    # Jobs of a range become owed over begin <= n < end rows.
    begin = owed.release(sources, first) + 1
    floors, has_fraction = owed.whole_rows(owed.rows)
    ends = (floors[sources] > last) | ((floors[sources] == last) & has_fraction[sources])
    end = np.full(len(last), owed.rows + 1)
    end[ends] = owed.release(sources[ends], last[ends] + 1) + 1
    counts = last - first + 1
    by_begin, by_end = np.argsort(begin, kind="stable"), np.argsort(end, kind="stable")
    num_drawn, rows = 0, []
    for line, curve in enumerate(owed.curves):
        first_row, end_row = owed.first_rows[line], owed.first_rows[line + 1]
        events = np.concatenate([begin, end, [first_row + 1, end_row + 1]])
        events = np.unique(events[(events > first_row) & (events <= end_row + 1)])
        active = _ActiveRanges(curve, owed.starts[line])
        num_begun = num_ended = jobs_ended = 0
        for n, next_n in pairwise(events.tolist()):
            while num_begun < len(by_begin) and begin[by_begin[num_begun]] <= n:
                index = int(by_begin[num_begun])
                num_begun += 1
                if end[index] > n:
                    active.add(int(sources[index]), int(first[index]), 1)
            while num_ended < len(by_end) and end[by_end[num_ended]] <= n:
                index = int(by_end[num_ended])
                num_ended += 1
                jobs_ended += int(counts[index])
                if end[index] > first_row + 1 and begin[index] < end[index]:
                    active.add(int(sources[index]), int(first[index]), -1)
            total = math.floor(active.owed(next_n - 1 - first_row) + jobs_ended + HALF)
            if total > num_drawn:
                counted = range(num_drawn + 1 - jobs_ended, total + 1 - jobs_ended)
                reached = active.reach(counted, n - first_row, next_n - 1 - first_row)
                rows.append(first_row + reached - 1)
                num_drawn = total
    return np.concatenate([*rows, np.empty(0, np.int64)])


class _ActiveRanges:
    """Rows owed to all active ranges, after n rows of a line."""

    def __init__(self, curve: OwedCurve, starts: Sequence[Fraction]) -> None:
        self.curve, self.starts = curve, starts
        self.bend = self.slope = 0
        self.start = Fraction(0)

    def add(self, source: int, first: int, sign: int) -> None:
        """Add a source's jobs from `first` on, or remove them with `sign` -1."""
        self.bend += sign * int(self.curve.bend[source])
        self.slope += sign * int(self.curve.slope[source])
        self.start += sign * (self.starts[source] - (first - 1))

    def owed(self, n: int) -> Fraction:
        return self.start + Fraction((self.bend * n + self.slope) * n, self.curve.unit)

    def reach(self, counts: range, low: int, high: int) -> Int64:
        """Find, by count, the first n in [low, high] whose sum, rounded to the nearest, reaches
        it."""
        unit, dtype = self.curve.unit, self.curve.dtype
        base = math.ceil((counts[0] - HALF - self.start) * unit)
        steps: Numbers = np.arange(len(counts)).astype(dtype)
        targets = float(base) + np.arange(len(counts)) * float(unit)
        root = np.sqrt(np.maximum(self.slope**2 / 4 + self.bend * targets, 0))
        guess = np.clip(np.rint(targets / np.maximum(self.slope / 2 + root, 0.5)), low, high)
        n: Int64 = guess.astype(np.int64)
        slope, bend, base, unit = (
            wrap(value, dtype) for value in (self.slope, self.bend, base, unit)
        )

        def is_below(indices: Int64, n: Int64) -> Bools:
            """Tell where the sum after n rows has not reached its count."""
            wide: Numbers = n.astype(dtype)
            difference = (bend * wide + slope) * wide - steps[indices] * unit - base
            below: Bools = (difference < 0).astype(bool)
            return below

        too_low = np.flatnonzero(is_below(np.arange(len(n)), n))
        while too_low.size:
            n[too_low] += 1
            too_low = too_low[is_below(too_low, n[too_low])]
        too_high = np.flatnonzero(n > low)
        while too_high.size:
            too_high = too_high[~is_below(too_high, n[too_high] - 1)]
            n[too_high] -= 1
            too_high = too_high[n[too_high] > low]
        return n


def serve_earliest_due(rows: Int64, release: Int64 | Int32, due: Int64) -> Int32:
    """Assign a job to every row, the earliest due among those released and unserved; returns job
    indices by row."""
    by_due = np.argsort(due, kind="stable").astype(np.int32)
    rank = np.empty(len(due), np.int32)
    rank[by_due] = np.arange(len(due), dtype=np.int32)
    by_release = np.argsort(release, kind="stable").astype(np.int32)
    num_released = np.searchsorted(release[by_release], rows, side="right").astype(np.int32)
    ranks_by_release = rank[by_release]
    del by_release, rank
    queue: list[int] = []
    served, first = np.empty(len(rows), np.int32), 0
    # In batches, as Python's integers take four times as much memory.
    for start in range(0, len(rows), BATCH_ROWS):
        ends = num_released[start : start + BATCH_ROWS].tolist()
        batch_first, batch_ranks = first, ranks_by_release[first : ends[-1]].tolist()
        batch_served = []
        for end in ends:
            for job_rank in batch_ranks[first - batch_first : end - batch_first]:
                heapq.heappush(queue, job_rank)
            first = end
            batch_served.append(heapq.heappop(queue))
        served[start : start + BATCH_ROWS] = batch_served
    jobs = by_due[served]
    assert (due[jobs] >= rows).all(), "every job is served while it is within its bounds"
    return jobs
