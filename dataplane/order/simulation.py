"""Simulate the chairman assignment row by row, until it repeats.

In a long segment with integer weights of sum W, the debts repeat after W rows. The assignment is
therefore a settling table, a repeated table, and a closing table: any row is O(1).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .tables import Tables, TablesBuilder, rank_entries

Numbers = npt.NDArray[Any]
"""64-bit integers, or Python's integers where these are too short."""

NEVER = 1 << 62
HEADROOM = 4
"""Sums of a few debts must fit into 64 bits."""
CLOSING_TABLES = 3
"""Tables written out before an edge: deadlines reach at most two tables ahead."""
MAX_TABLES = CLOSING_TABLES + 3
"""Maximum simulated tables in a segment: up to two to settle, the repeated, and the closing."""


@dataclass(frozen=True)
class Segment:
    """Rows of one length, with a constant integer weight per source."""

    rows: int
    weights: tuple[int, ...]
    row_tokens: int

    @cached_property
    def period(self) -> int:
        return sum(self.weights)


def estimate_simulated_rows(segments: Sequence[Segment]) -> int:
    """Estimate from above the rows that `simulate` assigns one by one."""
    return sum(min(segment.rows, MAX_TABLES * segment.period) for segment in segments)


def simulate(segments: Sequence[Segment]) -> tuple[Tables, Fraction]:
    """Assign the rows of all segments; also returns the largest debt in tokens at any row."""
    num_sources = len(segments[0].weights)
    tables, largest = TablesBuilder(num_sources), Fraction(0)
    # Debts are in 1/unit tokens: integers are several times faster than fractions.
    owed, unit = [0] * num_sources, 1
    for position, segment in enumerate(segments):
        before = tables.counts
        largest = max(largest, _assign(segments, position, owed, unit, tables))
        taken = (tables.counts - before).tolist()
        coarse_unit, unit = unit, math.lcm(unit, segment.period)
        row = segment.row_tokens * unit
        gain = row // segment.period * segment.rows
        owed = [
            debt * (unit // coarse_unit) + weight * gain - count * row
            for debt, weight, count in zip(owed, segment.weights, taken, strict=True)
        ]
        largest = max(largest, Fraction(max(owed), unit))
    return tables.finish(), largest


def debts_after(
    segment: Segment, owed: Sequence[Fraction], rows: int, taken: Sequence[int]
) -> list[Fraction]:
    """Compute the tokens owed to each source after the first `rows` rows of a segment."""
    return [
        debt + segment.row_tokens * (Fraction(weight * rows, segment.period) - count)
        for debt, weight, count in zip(owed, segment.weights, taken, strict=True)
    ]


def _assign(
    segments: Sequence[Segment], position: int, owed: list[int], unit: int, tables: TablesBuilder
) -> Fraction:
    """Append the tables of a segment; returns its largest debt in tokens before any row."""
    segment = segments[position]
    simulation = _Simulation(segments, position, owed, unit)
    period = segment.period
    settling: list[int] = []
    while segment.rows - simulation.row > (CLOSING_TABLES + 1) * period:
        table, counts = simulation.run(period)
        if counts != list(segment.weights):
            settling += table
            continue
        # Debts are the same as one period ago: from here on the table repeats.
        repeats = (segment.rows - simulation.row) // period - CLOSING_TABLES
        simulation.skip(repeats)
        tables.append(settling, len(settling))
        tables.append(table, period * (1 + repeats))
        settling = []
        break
    closing = settling + simulation.run(segment.rows - simulation.row)[0]
    tables.append(closing, len(closing))
    return Fraction(simulation.largest_debt, simulation.unit) * segment.row_tokens


class _Simulation:
    """Assigns the rows of one segment in order, in exact integers.

    Debts are in 1/unit rows, and so is `slack`, the d of apportionment.py. Releases and deadlines
    are computed for many jobs together; only the queue goes from row to row.
    """

    def __init__(
        self, segments: Sequence[Segment], position: int, owed: list[int], owed_unit: int
    ) -> None:
        """`owed`: debts in 1/owed_unit tokens."""
        self.segments, self.position = segments, position
        segment, num_sources = segments[position], len(owed)
        row = segment.row_tokens * owed_unit
        divisor = math.gcd(row, *owed)
        common = math.lcm(segment.period, row // divisor)
        slack_fraction = max(2, 2 * num_sources - 2)
        self.unit, self.slack = common * slack_fraction, common
        scale = self.unit // (row // divisor)
        simulated_rows = min(segment.rows, MAX_TABLES * segment.period)
        upper_bound = self.unit * (2 * simulated_rows + segment.rows + 9)
        self.dtype: type = np.int64 if upper_bound * HEADROOM < NEVER else object
        self.gain = self._array(
            weight * (self.unit // segment.period) for weight in segment.weights
        )
        self.initial_debt = self._array(debt // divisor * scale for debt in owed)
        self.taken = np.zeros(num_sources, np.int64)
        self.row = 0
        self.largest_debt = 0

    def run(self, rows: int) -> tuple[list[int], list[int]]:
        """Assign the next rows; returns their sources, and the rows by source."""
        keys, released = self._jobs(rows)
        num_sources, queue, first = len(self.taken), list[int](), 0
        assigned = []
        for end in released:  # the jobs [first, end) are released with this row
            for key in keys[first:end]:
                heapq.heappush(queue, key)
            first = end
            assigned.append(heapq.heappop(queue) % num_sources)
        self._note_debts(np.array(assigned, np.int64))
        counts = np.bincount(assigned, minlength=num_sources)
        self.taken += counts
        self.row += rows
        return assigned, counts.tolist()

    def skip(self, periods: int) -> None:
        """Advance as if the last period were repeated `periods` more times."""
        segment = self.segments[self.position]
        self.row += periods * segment.period
        self.taken += periods * np.array(segment.weights)

    def _array(self, values: Iterable[int]) -> Numbers:
        return np.array(list(values), self.dtype)

    def _jobs(self, rows: int) -> tuple[list[int], list[int]]:
        """List the jobs that are released within the next rows, in this order; also counts, by
        row, the jobs released so far.

        A job is one integer: deadline * num_sources + source.
        """
        end_row = self.row + rows
        # `debt` assumes that the source gets no further row. A job is released when the debt
        # reaches the slack; every earlier job of the source takes `unit` off the debt.
        debt = self.initial_debt - self.taken.astype(self.dtype) * self.unit
        counts = np.maximum((debt + end_row * self.gain - self.slack) // self.unit + 1, 0)
        sources, ranks = _enumerate_jobs(counts.astype(np.int64))
        debt = debt[sources] - ranks.astype(self.dtype) * self.unit
        gain = self.gain[sources]
        growing = gain > 0
        releases = np.full(len(sources), self.row, np.int64)
        releases[growing] = -((debt[growing] - self.slack) // gain[growing])
        keys = self._deadlines(sources, debt) * len(self.taken) + sources
        releases = np.maximum(releases, self.row + 1)
        order = np.argsort(releases, kind="stable")
        released = np.searchsorted(
            releases[order], np.arange(self.row + 1, end_row + 1), side="right"
        )
        return keys[order].tolist(), released.tolist()

    def _deadlines(self, sources: Int64, debt: Numbers) -> Numbers:
        """Compute the first row at which a debt exceeds 1 - d without another row."""
        rows, gain = self.segments[self.position].rows, self.gain[sources]
        due = (self.unit - self.slack - debt) // np.maximum(gain, 1) + 1
        later = np.flatnonzero((gain == 0) | (due > rows))
        # A deadline times the number of sources may exceed 64 bits.
        deadlines: Numbers = due.astype(object)
        debt_at_end = debt[later] + rows * gain[later]
        for job, source, owed in zip(
            later.tolist(), sources[later].tolist(), debt_at_end.tolist(), strict=True
        ):
            deadlines[job] = rows + self._later_deadline(source, owed)
        return deadlines

    def _note_debts(self, assigned: Int64) -> None:
        """Note the largest debt: a source's debt peaks just before it gets a row."""
        before = self.taken[assigned] + rank_entries(assigned, len(self.taken))
        rows: Numbers = np.arange(self.row, self.row + len(assigned)).astype(self.dtype)
        owed = self.initial_debt[assigned] + rows * self.gain[assigned]
        debts = owed - before.astype(self.dtype) * self.unit
        self.largest_debt = max(self.largest_debt, int(debts.max(initial=0)))

    def _later_deadline(self, source: int, debt: int) -> int:
        """Compute the deadline of a job with the debt `debt` at the segment's end, from there."""
        rows_passed = 0
        longest = self.segments[self.position].row_tokens
        tokens, unit = debt * longest, self.unit  # the debt is tokens / unit
        for segment in self.segments[self.position + 1 :]:
            longest = max(longest, segment.row_tokens)
            gain = segment.weights[source] * segment.row_tokens
            if gain:
                allowance = longest * (self.unit - self.slack) * unit - tokens * self.unit
                due = allowance * segment.period // (gain * self.unit * unit) + 1
                if due <= segment.rows:
                    return rows_passed + due
            tokens = tokens * segment.period + gain * segment.rows * unit
            unit *= segment.period
            rows_passed += segment.rows
        return NEVER


def _enumerate_jobs(counts: Int64) -> tuple[Int64, Int64]:
    """Enumerate counts[source] jobs of every source; returns sources and job numbers."""
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources, np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
