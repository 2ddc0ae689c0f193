"""The order of a run that decided shares while it ran: plan, decisions and row number give the row.

    rows   0 ──────────── 400 ─────────── 900 ─────────── end
    legs   the plan      │ decision 1    │ decision 2, then the phases after it
                         └ debts ►       └ debts ►

Each decision begins a leg with a fair order of its own (fair/eras.py) over all rows that the plan
still has. The next decision ends the leg, and changes none of its rows. Debts are carried from leg
to leg, as into a branch.

A leg is off by less than its first debts and a row. So debts up to a longest row are carried, which
keeps every source within two rows. Larger debts arise only from adversarial decisions, such as one
at every step; what exceeds a row is written off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from ..arrays import Int32, Int64
from .apportionment import Assignment
from .fair.eras import Debts, Eras, LoadSlowTable
from .fair.owed import Line
from .fair.settling import slice_line
from .plan import Decision, Phase, Plan, Stretch

Lines = list[tuple[int, list[Line]]]
"""Tokens per row, and lines, for consecutive phases with one sequence length."""


@dataclass(frozen=True, eq=False)
class Leg:
    """Rows from a decision on."""

    first_row: int
    """Counted from the plan's first row, as all rows here."""
    before: Int64
    """Rows before the first row, by source."""
    order: Assignment | Eras
    carried: Debts
    """Debts at the first row."""


class SteeredOrder:
    """Assigns every row to a source, as one of the source's draws: its rows, numbered from 0."""

    def __init__(
        self, plan: Plan, planned: Assignment | Eras, load: Callable[[str], LoadSlowTable]
    ) -> None:
        """`planned`: the order without decisions. `load` loads the slow jobs of a leg by name."""
        self.plan = plan
        self.rows = plan.rows
        self.bounds = [
            0,
            *(decision.row - plan.first_row for decision in plan.decisions),
            self.rows,
        ]
        """First row by leg, then the number of rows."""
        self._load = load
        nothing = (Fraction(0),) * len(plan.sources)
        no_rows = np.zeros(len(plan.sources), np.int64)
        self._legs = {0: Leg(0, no_rows, planned, nothing)}
        self._carried = [nothing]
        """Debts at the first row of each leg; the planned order knows its own."""
        self._lock = threading.RLock()

    @property
    def planned(self) -> Assignment | Eras:
        """The order without decisions."""
        return self._legs[0].order

    def reuse(self, earlier: SteeredOrder) -> None:
        """Take over what was computed for fewer decisions of the same plan."""
        with earlier._lock:
            self._legs, self._carried = dict(earlier._legs), list(earlier._carried)

    def locate(self, rows: Int64) -> tuple[Int32, Int64]:
        """Return, by row, the source, and the draw: the number of earlier rows with this source."""
        sources, draws = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        for number, places in group_places(np.searchsorted(self.bounds[1:-1], rows, side="right")):
            leg = self.leg(number)
            leg_sources, leg_draws = leg.order.locate(rows[places] - leg.first_row)
            sources[places], draws[places] = leg_sources, leg_draws + leg.before[leg_sources]
        return sources, draws

    def locate_draws(self, source: int, draws: Int64) -> Int64:
        """Return the rows of a source's draws; for draws after its last row, `self.rows`."""
        rows = np.full(len(draws), self.rows, np.int64)
        edges = [int(self.before(number)[source]) for number in range(len(self.bounds) - 1)]
        drawn = np.flatnonzero(draws < int(self.counts(self.rows)[source]))
        leg_ids = np.searchsorted(edges[1:], draws[drawn], side="right")
        for number, places in group_places(leg_ids):
            leg, in_leg = self.leg(number), drawn[places]
            rows[in_leg] = leg.order.locate_draws(source, draws[in_leg] - edges[number])
            rows[in_leg] += leg.first_row
        return rows

    def counts(self, row: int) -> Int64:
        """Count the rows [0, row) by source."""
        leg = self._leg_before(row)
        counts: Int64 = leg.before + leg.order.counts(row - leg.first_row)
        return counts

    def approximate_counts(self, row: int) -> Int64:
        """Approximate `counts(row)` to within a row."""
        leg = self._leg_before(row)
        counts: Int64 = leg.before + leg.order.approximate_counts(row - leg.first_row)
        return counts

    def debts(self, row: int) -> list[Fraction]:
        """Compute the tokens owed after the rows [0, row), by source, without written-off debts."""
        leg = self._leg_before(row)
        return leg.order.debts(row - leg.first_row)

    def leg(self, number: int) -> Leg:
        """Return the leg that decision `number` - 1 begins; 0: the plan's rows before the first.

        Where decisions say how many rows came before them, no earlier leg is assigned.
        """
        with self._lock:
            if number not in self._legs:
                self._legs[number] = self._assign_leg(number)
            return self._legs[number]

    def before(self, number: int) -> Int64:
        """Return the rows before a leg, by source."""
        if number and (before := self.plan.decisions[number - 1].before):
            return np.array(before, np.int64)
        leg = self.leg(max(number - 1, 0))
        counts: Int64 = leg.before + leg.order.counts(self.bounds[number] - leg.first_row)
        return counts

    def _leg_before(self, row: int) -> Leg:
        """Return the leg that holds the row before `row`."""
        return self.leg(int(np.searchsorted(self.bounds[1:-1], row, side="left")))

    def _assign_leg(self, number: int) -> Leg:
        while len(self._carried) <= number:
            self._carried.append(self._carry(self._owed(len(self._carried))))
        decision = self.plan.decisions[number - 1]
        carried = self._carried[number]
        order = Eras(
            lines_from(self.plan, decision),
            carried,
            pays_debts=True,
            load=self._load(f"{self.plan.hash}-{decision.digest}"),
        )
        return Leg(self.bounds[number], self.before(number), order, carried)

    def _owed(self, number: int) -> Debts:
        """Compute the tokens owed at the end of the leg before, by source."""
        first_row, row = self.bounds[number - 1 : number + 1]
        num_rows = row - first_row
        if number == 1:
            return tuple(self.planned.debts(num_rows))
        row_tokens, lines = lines_from(self.plan, self.plan.decisions[number - 2])[0]
        if num_rows > sum(line.rows for line in lines):  # rows of two lengths
            return tuple(self.leg(number - 1).order.debts(num_rows))
        taken = (self.before(number) - self.before(number - 1)).tolist()
        owed = zip(self._carried[number - 1], owed_rows(lines, num_rows), taken, strict=True)
        return tuple(debt + (rows - count) * row_tokens for debt, rows, count in owed)

    def _carry(self, owed: Debts) -> Debts:
        """Return the debts that the next decision carries: up to a longest row."""
        decision = self.plan.decisions[len(self._carried) - 1]
        phases = [phase for phase in self.plan.phases if phase.first_row <= decision.row]
        longest = Fraction(max(phase.seq_len for phase in phases))
        return tuple(max(-longest, min(debt, longest)) for debt in owed)

    def written_off(self, number: int) -> Debts:
        """Return the tokens by source that the decision of a leg did not carry."""
        with self._lock:
            carried = self.leg(number).carried
            owed = self.debts(self.bounds[number])
        return tuple(debt - kept for debt, kept in zip(owed, carried, strict=True))


def group_places(groups: Int64) -> Iterator[tuple[int, Int64]]:
    """Yield each group with the places where it stands, from one sort for all groups."""
    order = np.argsort(groups, kind="stable")
    numbers, starts = np.unique(groups[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=False)  # [] has one part


def owed_rows(lines: Sequence[Line], num_rows: int) -> list[Fraction]:
    """Compute the rows owed to each source after the first rows of lines."""
    owed = [Fraction(0)] * len(lines[0].start)
    for line in lines:
        rows, total = min(line.rows, num_rows), sum(line.start)
        ends = zip(line.start, line.end, strict=True)
        owed = [
            debt
            + Fraction(rows * (2 * line.rows * start + (end - start) * rows), 2 * line.rows * total)
            for debt, (start, end) in zip(owed, ends, strict=True)
        ]
        num_rows -= rows
        if not num_rows:
            break
    return owed


def lines_from(plan: Plan, decision: Decision) -> Lines:
    """Return the lines from a decision on: its shares up to the phase's end, then the plan's."""
    decided = plan.phase_at(decision.row)
    stretch = Stretch(rows=decided.end_row - decision.row, weights=decision.weights)
    later = (phase for phase in plan.phases if phase.first_row > decision.row)
    return replace(plan, phases=(replace(decided, stretches=(stretch,)), *later)).lines()


def decided_phases(plan: Plan) -> tuple[Phase, ...]:
    """Return the phases with the shares that were decided, a stretch for each decision."""
    by_phase: dict[int, list[Decision]] = {}
    for decision in plan.decisions:
        by_phase.setdefault(plan.phase_at(decision.row).first_row, []).append(decision)
    return tuple(_decide(phase, by_phase.get(phase.first_row, [])) for phase in plan.phases)


def _decide(phase: Phase, decisions: Sequence[Decision]) -> Phase:
    if not decisions:
        return phase
    edges = [*(decision.row for decision in decisions), phase.end_row]
    decided = [
        Stretch(rows=end_row - row, weights=decision.weights)
        for decision, (row, end_row) in zip(decisions, pairwise(edges), strict=True)
    ]
    planned = _cut_stretches(phase.stretches, edges[0] - phase.first_row)
    return replace(phase, stretches=(*planned, *decided))


def _cut_stretches(stretches: Sequence[Stretch], rows: int) -> Iterator[Stretch]:
    """Yield the first `rows` rows of stretches."""
    for stretch in stretches:
        size = min(stretch.rows, rows)
        if size:
            line = Line(stretch.rows, stretch.weights, stretch.to or stretch.weights)
            start = slice_line(line, 0, size)
            to = start.end if start.start != start.end else ()
            yield Stretch(rows=size, weights=start.start, to=to)
        rows -= size
