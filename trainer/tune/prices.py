"""Predicted seconds of a layout plan by the figures of a hardware file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ..costs.hardware import Hardware
from ..costs.planner.assemble import assigned
from ..costs.planner.grid import grid_of
from ..costs.planner.layers import Costs
from ..costs.planner.machine import Machine
from ..costs.planner.make import uniform_phase
from ..run.config import RunConfig
from ..run.layout_plan import LayoutPlan

if TYPE_CHECKING:
    from ...models.config import ModelConfig


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

    def seconds(
        self, plan: LayoutPlan, hardware: Hardware, seq_len: int, batch_tokens: int
    ) -> float:
        """Return the seconds of a step of a plan."""
        return self.price(plan, hardware, seq_len, batch_tokens)[0]

    def price(
        self, plan: LayoutPlan, hardware: Hardware, seq_len: int, batch_tokens: int
    ) -> tuple[float, int]:
        """Return the seconds of a step of a plan, and the bytes of the fullest rank."""
        costs = self.costs(hardware, seq_len, batch_tokens)
        layout, gpus = plan.layout, plan.planned.gpus
        grid = grid_of(layout, plan.engine, plan.micro_batch_tokens, gpus, costs.phase)
        budget = hardware.usable_memory
        problem = costs.problem(grid, budget, all_choices=True)
        wanted = [
            (span.recompute, span.reshard, span.sequence)
            for span in plan.layers
            for _ in range(span.layers[0], span.layers[1] + 1)
        ]
        choices = []
        for layer, (sort, key) in enumerate(zip(problem.layers, wanted, strict=True)):
            by = {choice.name.key: choice for choice in problem.sorts[sort].choices}
            if key not in by:
                raise PlanError(
                    f"the planner has no price for the choices of layer {layer} "
                    f"(recompute {key[0]}, reshard {key[1]})",
                    hint="choose among those that `trainer plan` writes",
                )
            choices.append(by[key])
        made = assigned(problem, layout.cuts or (), choices)
        buffers = budget - problem.budget
        return made.price, round(max(stage.memory for stage in made.stages) + buffers)
