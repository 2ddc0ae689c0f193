"""Steps whose rows have one length: a step gets a length, then each of its rows a source.

    step         0       1       2       3       4       5
    length     4,096    512    4,096    512    1,024   4,096
    source    web, web  chat    code   chat     web     web ...

Sources that give the model rows of one length are a group. A group's share of the steps is the sum
of its sources' shares. Its rows, in all of its steps, are a stream of their own, which its sources
share in proportion. Both are assigned like the rows of any plan, so both directions are functions,
and neither groups nor the sources within one drift from their shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Protocol

import numpy as np

from ..arrays import Int32, Int64
from .plan import Plan
from .simulation import Segment, debts_after

Debts = tuple[Fraction, ...]


class Assigned(Protocol):
    """Rows assigned to sources (apportionment.py, fair/eras.py); here also steps to groups."""

    def locate(self, rows: Int64) -> tuple[Int32, Int64]: ...
    def locate_draws(self, source: int, draws: Int64) -> Int64: ...
    def counts(self, row: int) -> Int64: ...


Assign = Callable[[str, list[Segment], Debts], Assigned]
"""Assigns rows, given a name, segments and debts."""


class LengthSteps:
    """Assigns every row to a source, as one of the source's draws; a step's rows to one group."""

    def __init__(self, plan: Plan, assign: Assign) -> None:
        self.phases, self.segments = plan.phases, plan.segments()
        self.start_debts = plan.debts or (Fraction(0),) * len(plan.sources)
        self.lengths = sorted(set(plan.lengths))
        """Length of each group; 0 for whole rows of the plan."""
        self.groups = np.searchsorted(self.lengths, plan.lengths)
        """[sources]"""
        self.members = [np.flatnonzero(self.groups == group) for group in range(len(self.lengths))]
        self.member_numbers = np.zeros(len(plan.sources), np.int64)
        for members in self.members:
            self.member_numbers[members] = np.arange(len(members))
        batch_rows = [phase.batch_rows for phase in plan.phases for _ in phase.stretches]
        num_steps = [
            segment.rows // rows for segment, rows in zip(self.segments, batch_rows, strict=True)
        ]
        step_edges = [0, *accumulate(num_steps)]
        group_weights = [
            tuple(sum(segment.weights[source] for source in members) for members in self.members)
            for segment in self.segments
        ]
        self.steps = assign(
            "steps",
            [
                Segment(steps, weights, rows * segment.row_tokens)
                for segment, weights, rows, steps in zip(
                    self.segments, group_weights, batch_rows, num_steps, strict=True
                )
            ],
            tuple(
                sum((self.start_debts[source] for source in members), Fraction(0))
                for members in self.members
            ),
        )
        steps_before = np.array([self.steps.counts(edge) for edge in step_edges])
        group_rows = np.diff(steps_before, axis=0) * np.array(batch_rows)[:, None]
        self.rows_of_group = [
            self._assign_group(assign, group, group_rows[:, group].tolist())
            for group in range(len(self.lengths))
        ]
        phase_edges = [0, *accumulate(len(phase.stretches) for phase in plan.phases)]
        rows_before = np.cumsum(group_rows, axis=0) - group_rows
        self.batch_rows = np.array([phase.batch_rows for phase in plan.phases])
        self.first_rows = np.array([phase.first_row for phase in plan.phases]) - plan.first_row
        self.first_steps = np.array(step_edges)[phase_edges[:-1]]
        self.steps_before = steps_before[phase_edges[:-1]]
        """[phases, groups] Steps of a group before each phase."""
        self.rows_before = rows_before[phase_edges[:-1]]
        """[phases, groups]"""
        self.rows = plan.rows

    def locate(self, rows: Int64) -> tuple[Int32, Int64]:
        """Return, by row, the source, and the draw: the number of earlier rows with this source."""
        phases, steps, rows_in_step = self._split(rows)
        distinct, step_ids = np.unique(steps, return_inverse=True)
        distinct_groups, distinct_numbers = self.steps.locate(distinct)
        groups, numbers = distinct_groups[step_ids], distinct_numbers[step_ids]
        steps_in_phase = numbers - self.steps_before[phases, groups]
        group_rows = self.rows_before[phases, groups] + (
            steps_in_phase * self.batch_rows[phases] + rows_in_step
        )
        sources, draws = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        for group in np.unique(groups).tolist():
            mask = groups == group
            members, draws[mask] = self._rows(group).locate(group_rows[mask])
            sources[mask] = self.members[group][members]
        return sources, draws

    def locate_draws(self, source: int, draws: Int64) -> Int64:
        """Return the rows of a source's draws; for draws after its last row, `self.rows`."""
        group = int(self.groups[source])
        rows = np.full(len(draws), self.rows, np.int64)
        assigned = self.rows_of_group[group]
        if assigned is None:
            return rows
        group_rows = assigned.locate_draws(int(self.member_numbers[source]), draws)
        is_drawn = np.flatnonzero(group_rows < self._total(group))
        group_rows = group_rows[is_drawn]
        before = self.rows_before[:, group]
        phases = np.searchsorted(before, group_rows, side="right") - 1
        numbers, rows_in_step = np.divmod(group_rows - before[phases], self.batch_rows[phases])
        steps = self.steps.locate_draws(group, self.steps_before[phases, group] + numbers)
        steps_in_phase = steps - self.first_steps[phases]
        rows[is_drawn] = (
            self.first_rows[phases] + steps_in_phase * self.batch_rows[phases] + rows_in_step
        )
        return rows

    def counts(self, row: int) -> Int64:
        """Count the rows [0, row) by source."""
        phases, steps, rows_in_step = self._split(np.array([row]))
        phase, step, extra_rows = int(phases[0]), int(steps[0]), int(rows_in_step[0])
        num_steps = self.steps.counts(step) - self.steps_before[phase]
        group_rows = self.rows_before[phase] + num_steps * self.batch_rows[phase]
        if extra_rows:
            group_rows[self.steps.locate(steps)[0][0]] += extra_rows
        counts = np.zeros(len(self.groups), np.int64)
        for group, num_rows in enumerate(group_rows.tolist()):
            if num_rows:
                counts[self.members[group]] = self._rows(group).counts(num_rows)
        return counts

    def approximate_counts(self, row: int) -> Int64:
        """Count the rows [0, row) by source, exactly."""
        return self.counts(row)

    def debts(self, row: int) -> list[Fraction]:
        """Compute the tokens owed after the rows [0, row), by source."""
        owed, first_row, counts = list(self.start_debts), 0, self.counts(0)
        for segment in self.segments:
            end = min(first_row + segment.rows, row)
            if end <= first_row:
                break
            counts_before, counts = counts, self.counts(end)
            owed = debts_after(segment, owed, end - first_row, (counts - counts_before).tolist())
            first_row = end
        return owed

    def _split(self, rows: Int64) -> tuple[Int64, Int64, Int64]:
        """Return, by row, the phase, the step, and the row's number in the step."""
        phases = np.searchsorted(self.first_rows, rows, side="right") - 1
        steps, rows_in_step = np.divmod(rows - self.first_rows[phases], self.batch_rows[phases])
        return phases, self.first_steps[phases] + steps, rows_in_step

    def _assign_group(self, assign: Assign, group: int, rows: Sequence[int]) -> Assigned | None:
        """Assign a group's rows, `rows` of them in each segment; None if there are none."""
        weights = [
            [segment.weights[source] for source in self.members[group]] for segment in self.segments
        ]
        weighted = [number for number, shares in enumerate(weights) if any(shares)]
        segments = []
        for number, (segment, num_rows) in enumerate(zip(self.segments, rows, strict=True)):
            if not num_rows:
                continue
            if not any(weights[number]):  # a step that pays a debt, after the group's share ended
                number = max((n for n in weighted if n < number), default=weighted[0])
            divisor = math.gcd(*weights[number])
            shares = tuple(weight // divisor for weight in weights[number])
            segments.append(Segment(num_rows, shares, segment.row_tokens))
        debts = tuple(self.start_debts[source] for source in self.members[group])
        return assign(f"rows-{self.lengths[group]}", segments, debts) if segments else None

    def _rows(self, group: int) -> Assigned:
        assigned = self.rows_of_group[group]
        assert assigned is not None, "a group with a step has rows"
        return assigned

    def _total(self, group: int) -> int:
        """Count a group's rows in the plan."""
        steps = self.steps.counts(int(self.first_steps[-1]) + self.phases[-1].steps)
        return int(
            self.rows_before[-1, group]
            + (steps[group] - self.steps_before[-1, group]) * self.batch_rows[-1]
        )
