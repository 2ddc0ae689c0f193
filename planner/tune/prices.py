"""Predicted seconds of a layout plan by the figures of a hardware file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ...trainer.run.config import RunConfig
from ...trainer.run.layout_plan import LayoutPlan
from ..division.assigned import PricedDivision, price_division
from ..division.bounds import quick_bound
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
class Pricing:
    """A model and a run, whose layouts are priced."""

    model: ModelConfig
    run: RunConfig
    roofline: bool = False
    """True if kernels without a rate are priced by their bytes and operations."""

    def costs(self, hardware: Hardware, seq_len: int, batch_tokens: int) -> Costs:
        """Return the costs of steps of this length and batch."""
        machine = Machine(hardware, self.run.precision, roofline=self.roofline)
        phase = uniform_phase(seq_len, batch_tokens // seq_len)
        return Costs(self.model, self.run, machine, phase)

    def price(
        self, plan: LayoutPlan, hardware: Hardware, seq_len: int, batch_tokens: int
    ) -> tuple[float, int]:
        """Return the seconds of a step of a plan, and the bytes of the fullest rank."""
        made = self._assigned(plan, hardware, seq_len, batch_tokens)
        return made[2].price, _memory(plan, *made).highest

    def predicted(self, plan: LayoutPlan, hardware: Hardware) -> LayoutPlan:
        """Return a plan with the predictions by the figures of a hardware file."""
        phases = plan.planned.phases
        each = [self._assigned(plan, hardware, p.seq_len, p.batch_tokens) for p in phases]
        memories = [_memory(plan, *one) for one in each]
        _, problem, made, _ = each[0]
        memory = max(memories, key=lambda found: found.highest)
        return replace(
            plan,
            planned=replace(
                plan.planned,
                hardware=f"{hardware.file.name}#{hardware.digest}",
                phases=tuple(
                    replace(phase, seconds=one[2].price, memory=own.highest)
                    for phase, one, own in zip(phases, each, memories, strict=True)
                ),
            ),
            predicted=replace(
                plan.predicted,
                seconds=made.price,
                bound=quick_bound(problem),
                by=time_by_part(problem, made),
                memory=memory.highest,
                memory_by=memory.parts,
            ),
        )

    def _assigned(
        self, plan: LayoutPlan, hardware: Hardware, seq_len: int, batch_tokens: int
    ) -> tuple[Costs, Problem, PricedDivision, Grid]:
        """Return the plan as a solution of its layout's problem."""
        costs = self.costs(hardware, seq_len, batch_tokens)
        layout, gpus = plan.layout, plan.planned.gpus
        grid = make_grid(layout, plan.engine, plan.micro_batch_tokens, gpus, costs.phase)
        problem = costs.problem(grid, hardware.usable_memory, all_choices=True)
        wanted = [
            (span.recompute, span.reshard, span.sequence)
            for span in plan.layers
            for _ in range(span.layers[0], span.layers[1] + 1)
        ]
        choices = []
        for layer, (kind, key) in enumerate(zip(problem.layers, wanted, strict=True)):
            by = {choice.name.key: choice for choice in problem.kinds[kind].choices}
            if key not in by:
                raise PlanError(
                    f"the planner has no price for the choices of layer {layer} "
                    f"(recompute {key[0]}, reshard {key[1]})",
                    hint="choose among those that `trainer plan` writes",
                )
            choices.append(by[key])
        return costs, problem, price_division(problem, layout.cuts or (), choices), grid


def _memory(
    plan: LayoutPlan, costs: Costs, problem: Problem, made: PricedDivision, grid: Grid
) -> Timeline:
    """Return the memory of the plan's fullest rank."""
    return peak_timeline(costs.memory.timelines(grid, plan.engine_of_layers, made.cuts, plan.rules))
