"""Predicted seconds and memory of a layout plan, with the figures in a hardware file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...trainer.run.config import RunConfig
from ...trainer.run.layout_plan import LayoutPlan
from ..division.bounds import quick_bound
from ..grid.grid import make_grid
from ..hardware import Hardware
from ..prices.layers import Costs
from ..prices.machine import Machine
from ..search.assemble import build_phase_plan, peak_timeline, time_by_part
from ..search.given_layout import price_layout
from ..search.make import uniform_phase
from ..search.outcome import Candidate

if TYPE_CHECKING:
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
        return priced.solution.price, peak_timeline(priced.timelines).highest

    def predict(self, plan: LayoutPlan, hardware: Hardware) -> LayoutPlan:
        """Return the plan with predictions from the figures in a hardware file."""
        phases = plan.planned.phases
        priced_phases = [
            self._price_plan(plan, hardware, phase.seq_len, phase.batch_tokens) for phase in phases
        ]
        timelines = [peak_timeline(priced.timelines) for priced in priced_phases]
        memory = max(timelines, key=lambda timeline: timeline.highest)
        _, problem, division, _ = build_phase_plan(priced_phases[0])
        return replace(
            plan,
            planned=replace(
                plan.planned,
                hardware=f"{hardware.file.name}#{hardware.digest}",
                phases=tuple(
                    replace(phase, seconds=priced.solution.price, memory=timeline.highest)
                    for phase, priced, timeline in zip(
                        phases, priced_phases, timelines, strict=True
                    )
                ),
            ),
            predicted=replace(
                plan.predicted,
                seconds=division.price,
                bound=quick_bound(problem),
                by=time_by_part(problem, division),
                memory=memory.highest,
                memory_by=memory.parts,
            ),
        )

    def _price_plan(
        self, plan: LayoutPlan, hardware: Hardware, seq_len: int, batch_tokens: int
    ) -> Candidate:
        """Price the plan as a solution to its layout's problem."""
        costs = self.costs(hardware, seq_len, batch_tokens)
        layout, gpus = plan.layout, plan.planned.gpus
        keys = [
            (span.recompute, span.reshard, span.sequence)
            for span in plan.layers
            for _ in range(span.layers[0], span.layers[1] + 1)
        ]
        return price_layout(
            costs,
            make_grid(layout, plan.engine, plan.micro_batch_tokens, gpus, costs.phase),
            hardware.usable_memory,
            cuts=layout.cuts or (),
            keys=keys,
            engine=plan.resolved_engine,
        )
