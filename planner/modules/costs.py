"""Costs of a sequence of modules in a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ...console.progress import as_bytes, human
from ...trainer.run.config import RunConfig
from ..division.problem import FixedCosts, Problem
from ..grid.grid import Grid
from ..memory.footprints import WHOLE
from ..memory.rank_memory import ModelParts
from ..prices.layers import Costs
from ..prices.machine import Machine
from ..traces.trace import ModelTrace
from .model import ModuleModel, Traced, flops

if TYPE_CHECKING:
    from ...dataplane.order.timeline import PhaseRows


class ModuleCosts(Costs):
    """Costs of modules that are not ours: data-parallel ranks and stages share them."""

    def __init__(self, traced: Traced, run: RunConfig, machine: Machine, phase: PhaseRows) -> None:
        if run.optimizer.kind != "adamw":
            raise PlanError(
                f"optimizer.kind={run.optimizer.kind} does not know the matrices of "
                f"{traced.model.module}",
                hint="plan modules with adamw",
            )
        self.traced, self.module = traced, traced.model.module
        super().__init__(traced.config, run, machine, phase)

    @property
    def modules(self) -> ModuleModel:
        return self.traced.model

    def _trace(self) -> ModelTrace:
        return self.traced.trace

    def _parts(self) -> ModelParts:
        from .memory import ModuleParts

        return ModuleParts(self.modules, self.trace, self.precision)

    def fastest(self, grid: Grid, *, simulate: bool = False) -> Problem:
        """Return the problem of a layout: embedding and head are modules like the others."""
        return replace(
            super().fastest(grid, simulate=simulate), first=FixedCosts(), last=FixedCosts()
        )


def describe_kinds(costs: ModuleCosts) -> Iterator[str]:
    """Yield a line for each kind: its number, parameters, operations and bytes of a row."""
    kept = costs.memory.footprints.of(WHOLE, 1, "torch").kinds
    columns = zip(costs.modules.kinds, costs.trace.kinds, kept, strict=True)
    for number, (kind, trace, sizes) in enumerate(columns):
        places = [place for place, other in enumerate(costs.modules.layers) if other == number]
        yield (
            f"module {_places(places)}: {kind.name}, {human(kind.elements)} parameters; a row has "
            f"{human(flops(trace.forward))}FLOP forward, {human(flops(trace.backward))}FLOP "
            f"backward, and keeps {as_bytes(round(sizes['none'].kept))} "
            f"({as_bytes(round(sizes['block'].kept))} with recompute)"
        )


def _places(places: list[int]) -> str:
    first, last = places[0], places[-1]
    if places == list(range(first, last + 1)):
        return str(first) if first == last else f"{first}–{last}"
    return ", ".join(map(str, places))
