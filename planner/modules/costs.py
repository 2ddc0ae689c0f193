"""Costs where foreign modules take the place of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ...console.progress import format_bytes, format_number
from ...trainer.run.config import RunConfig
from ..division.problem import FixedCosts, Problem
from ..grid.grid import Grid
from ..memory.footprints import ONE_ROW
from ..memory.parts import ModelParts
from ..prices.layers import Costs
from ..prices.machine import Machine
from ..traces.trace import ModelTrace
from .model import TracedModules, count_flops

if TYPE_CHECKING:
    from ...dataplane.order.timeline import PhaseRows


class ModuleCosts(Costs):
    """Costs where data-parallel ranks and stages share foreign modules."""

    def __init__(
        self, traced: TracedModules, run: RunConfig, machine: Machine, phase: PhaseRows
    ) -> None:
        if run.optimizer.kind != "adamw":
            raise PlanError(
                f"optimizer.kind={run.optimizer.kind} does not know the matrices of "
                f"{traced.model.module}",
                hint="plan modules with adamw",
            )
        self.traced, self.module = traced, traced.model.module
        super().__init__(traced.config, run, machine, phase)

    def _trace(self) -> ModelTrace:
        return self.traced.trace

    def _parts(self) -> ModelParts:
        from .memory import ModuleParts

        return ModuleParts(self.traced.model, self.trace, self.precision)

    @property
    def model_hash(self) -> str:
        return self.traced.hash

    def fastest_problem(self, grid: Grid, *, simulate: bool = False) -> Problem:
        """Return the layout's problem without ends: embedding and head are plain modules."""
        return replace(
            super().fastest_problem(grid, simulate=simulate), first=FixedCosts(), last=FixedCosts()
        )


def describe_kinds(costs: ModuleCosts) -> Iterator[str]:
    """Yield a line per kind: its modules, parameters, and FLOP and activations per row."""
    model = costs.traced.model
    footprints = costs.memory.footprints.estimate(ONE_ROW, 1, "torch").kinds
    columns = zip(model.kinds, costs.trace.kinds, footprints, strict=True)
    for number, (kind, trace, sizes) in enumerate(columns):
        layers = [layer for layer, kind_number in enumerate(model.layers) if kind_number == number]
        yield (
            f"module {_format_numbers(layers)}: {kind.name}, "
            f"{format_number(kind.num_parameters)} parameters; a row has "
            f"{format_number(count_flops(trace.forward))}FLOP forward, "
            f"{format_number(count_flops(trace.backward))}FLOP backward, and keeps "
            f"{format_bytes(round(sizes['none'].activations))} "
            f"({format_bytes(round(sizes['block'].activations))} with recompute)"
        )


def _format_numbers(numbers: list[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if numbers == list(range(first, last + 1)):
        return str(first) if first == last else f"{first}–{last}"
    return ", ".join(map(str, numbers))
