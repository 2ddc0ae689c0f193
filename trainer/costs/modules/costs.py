"""Costs of a sequence of modules in a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ....console.errors import PlanError
from ....console.progress import as_bytes, human
from ....models.accounting.state import Shards
from ....models.parallel.sharding import LocalShard
from ....models.precision import Precision
from ...run.config import RunConfig
from ..planner.division.problem import Fixed, Problem
from ..planner.grid import Grid
from ..planner.layers import Costs
from ..planner.machine import Machine
from ..planner.trace import ModelTrace
from .load import ModuleModel
from .trace import Traced, flops

if TYPE_CHECKING:
    from ....dataplane.order.timeline import PhaseRows


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

    def _shards(self, tp: int, ep: int) -> tuple[list[Shards], Shards, Shards, dict[str, Shards]]:
        layers: list[Shards] = [
            {f"blocks.{number}.{name}": LocalShard(shape) for name, shape in sort.parameters}
            for number, sort in enumerate(self.modules.sorts)
        ]
        return layers, {}, {}, {}

    def problem(self, grid: Grid, budget: float, **options: bool) -> Problem:
        """Return the problem of a layout: embedding and head are modules like the others."""
        return replace(super().problem(grid, budget, **options), first=Fixed(), last=Fixed())

    @cached_property
    def _meta(self) -> Any:
        return _Parameters(self.shards(1, 1)[0])


class _Parameters(nn.Module):
    """Parameters of each sort, for the state of an engine."""

    def __init__(self, layers: list[Shards]) -> None:
        super().__init__()
        self.shapes = {name: each.shape for shards in layers for name, each in shards.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, shape in self.shapes.items():
            yield name, nn.Parameter(torch.empty(shape, device="meta"))

    def full_precision(self, precision: Precision) -> tuple[str, ...]:
        return ()


def sort_lines(traced: Traced) -> Iterator[str]:
    """Yield a line for each sort: its number, parameters, operations and bytes of a row."""
    for number, (sort, trace) in enumerate(
        zip(traced.model.sorts, traced.trace.sorts, strict=True)
    ):
        places = [place for place, other in enumerate(traced.model.layers) if other == number]
        yield (
            f"module {_places(places)}: {sort.name}, {human(sort.elements)} parameters; a row has "
            f"{human(flops(trace.forward))}FLOP forward, {human(flops(trace.backward))}FLOP "
            f"backward, and keeps {as_bytes(trace.everything)} ({as_bytes(trace.stream)} with "
            "recompute)"
        )


def _places(places: list[int]) -> str:
    first, last = places[0], places[-1]
    if places == list(range(first, last + 1)):
        return str(first) if first == last else f"{first}–{last}"
    return ", ".join(map(str, places))
