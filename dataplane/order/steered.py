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
    written_off: Debts
    """Tokens by source that the decision did not carry."""


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
        no_rows = np.zeros(len(plan.sources), np.int64)
        self._legs = [Leg(0, no_rows, planned, ())]
        self._extending = threading.Lock()

    @property
    def planned(self) -> Assignment | Eras:
        """The order without decisions."""
        return self._legs[0].order

    def reuse(self, earlier: SteeredOrder) -> None:
        """Take over what was computed for fewer decisions of the same plan."""
        with earlier._extending:
            self._legs = list(earlier._legs)

    def locate(self, rows: Int64) -> tuple[Int32, Int64]:
        """Return, by row, the source, and the draw: the number of earlier rows with this source."""
        sources, draws = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        leg_ids = np.searchsorted(self.bounds[1:-1], rows, side="right")
        for leg_id in np.unique(leg_ids).tolist():
            mask, leg = leg_ids == leg_id, self.leg(leg_id)
            leg_sources, leg_draws = leg.order.locate(rows[mask] - leg.first_row)
            sources[mask], draws[mask] = leg_sources, leg_draws + leg.before[leg_sources]
        return sources, draws

    def locate_draws(self, source: int, draws: Int64) -> Int64:
        """Return the rows of a source's draws; for draws after its last row, `self.rows`."""
        rows = np.full(len(draws), self.rows, np.int64)
        for leg_id, (_, end_row) in enumerate(pairwise(self.bounds)):
            leg = self.leg(leg_id)
            mask = (draws >= leg.before[source]) & (draws < self.counts(end_row)[source])
            if mask.any():
                leg_rows = leg.order.locate_draws(source, draws[mask] - leg.before[source])
                rows[mask] = leg_rows + leg.first_row
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
        """Return the leg that decision `number` - 1 begins; 0: the plan's rows before the first."""
        with self._extending:
            while len(self._legs) <= number:
                self._legs.append(self._next_leg())
        return self._legs[number]

    def _leg_before(self, row: int) -> Leg:
        """Return the leg that holds the row before `row`."""
        return self.leg(int(np.searchsorted(self.bounds[1:-1], row, side="left")))

    def _next_leg(self) -> Leg:
        last, decision = self._legs[-1], self.plan.decisions[len(self._legs) - 1]
        row = decision.row - self.plan.first_row
        before = last.before + last.order.counts(row - last.first_row)
        owed = last.order.debts(row - last.first_row)
        phases = [phase for phase in self.plan.phases if phase.first_row <= decision.row]
        longest = Fraction(max(phase.seq_len for phase in phases))
        debts = tuple(max(-longest, min(debt, longest)) for debt in owed)
        written_off = tuple(debt - kept for debt, kept in zip(owed, debts, strict=True))
        order = Eras(
            lines_from(self.plan, decision),
            debts,
            pays_debts=True,
            load=self._load(f"{self.plan.hash}-{decision.digest}"),
        )
        return Leg(row, before, order, written_off)


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
