"""Predicted seconds and memory of a layout plan, with the figures in a hardware file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ...console.errors import PlanError
from ...trainer.run.config import RunConfig
from ...trainer.run.layout_plan import LayoutPlan
from ..division.bounds import quick_bound
from ..division.pricing import PricedDivision, price_division
from ..division.problem import Problem
from ..grid.grid import Grid, make_grid
from ..hardware import Hardware
from ..prices.layers import Costs
from ..prices.machine import Machine
from ..search.assemble import peak_timeline, time_by_part
from ..search.make import uniform_phase

if TYPE_CHECKING:
    from ...models.accounting.step import Timeline
    from ...models.config.config import ModelConfig


@dataclass(frozen=True)
class PlanPricer:
    """Predicts steps of layout plans for a model and a run."""

    model: ModelConfig
    run: RunConfig
    roofline: bool = False
    """True to price kernels without a rate by their bytes and operations."""

    def costs(self, hardware: Hardware, seq_len: int, batch_tokens: int) -> Costs:
        """Return the costs of steps with this row length and batch."""
        machine = Machine(hardware, self.run.precision, roofline=self.roofline)
        phase = uniform_phase(seq_len, batch_tokens // seq_len)
        return Costs(self.model, self.run, machine, phase)

    def price(
        self, plan: LayoutPlan, hardware: Hardware, seq_len: int, batch_tokens: int
    ) -> tuple[float, int]:
        """Return a plan's seconds a step, and the bytes of its fullest rank."""
        priced = self._price_plan(plan, hardware, seq_len, batch_tokens)
        return priced.division.price, _peak_memory(plan, priced).highest

    def predict(self, plan: LayoutPlan, hardware: Hardware) -> LayoutPlan:
        """Return the plan with predictions from the figures in a hardware file."""
        phases = plan.planned.phases
        priced_phases = [
            self._price_plan(plan, hardware, phase.seq_len, phase.batch_tokens) for phase in phases
        ]
        timelines = [_peak_memory(plan, priced) for priced in priced_phases]
        memory = max(timelines, key=lambda timeline: timeline.highest)
        first = priced_phases[0]
        return replace(
            plan,
            planned=replace(
                plan.planned,
                hardware=f"{hardware.file.name}#{hardware.digest}",
                phases=tuple(
                    replace(phase, seconds=priced.division.price, memory=timeline.highest)
                    for phase, priced, timeline in zip(
                        phases, priced_phases, timelines, strict=True
                    )
                ),
            ),
            predicted=replace(
                plan.predicted,
                seconds=first.division.price,
                bound=quick_bound(first.problem),
                by=time_by_part(first.problem, first.division),
                memory=memory.highest,
                memory_by=memory.parts,
            ),
        )

    def _price_plan(
        self, plan: LayoutPlan, hardware: Hardware, seq_len: int, batch_tokens: int
    ) -> _PricedPlan:
        """Price the plan as a solution to its layout's problem."""
        costs = self.costs(hardware, seq_len, batch_tokens)
        layout, gpus = plan.layout, plan.planned.gpus
        grid = make_grid(layout, plan.engine, plan.micro_batch_tokens, gpus, costs.phase)
        problem = costs.problem(grid, hardware.usable_memory, all_choices=True)
        keys = [
            (span.recompute, span.reshard, span.sequence)
            for span in plan.layers
            for _ in range(span.layers[0], span.layers[1] + 1)
        ]
        choices = []
        for layer, (kind, key) in enumerate(zip(problem.layers, keys, strict=True)):
            choices_by_key = {choice.name.key: choice for choice in problem.kinds[kind].choices}
            if key not in choices_by_key:
                raise PlanError(
                    f"the planner has no price for the choices of layer {layer} "
                    f"(recompute {key[0]}, reshard {key[1]})",
                    hint="choose among those that `trainer plan` writes",
                )
            choices.append(choices_by_key[key])
        division = price_division(problem, layout.cuts or (), choices)
        return _PricedPlan(costs, grid, problem, division)


class _PricedPlan(NamedTuple):
    """A plan as a division of its layers, with the problem that it solves."""

    costs: Costs
    grid: Grid
    problem: Problem
    division: PricedDivision


def _peak_memory(plan: LayoutPlan, priced: _PricedPlan) -> Timeline:
    """Return the memory timeline of the plan's fullest rank."""
    memory, cuts = priced.costs.memory, priced.division.cuts
    return peak_timeline(memory.timelines(priced.grid, plan.resolved_engine, cuts, plan.rules))
