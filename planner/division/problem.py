"""A planning problem in numbers: layers of a few kinds, stages, a schedule, a memory budget.

A *division* cuts the layers into chunks; a *choice* says how a layer runs: what it recomputes, and
what it keeps. The price of both is the simulated time of a step:

    price = max over stages (end of the stage's last pass + its update)

Choices of a kind differ in their backward pass alone, because recomputation and second gathers run
there. So among choices that fit into memory, the ones of least backward time are best, whatever the
other stages do: a longer pass never shortens a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...trainer.layout.cuts import Cuts
from ...trainer.layout.schedules import PLAIN, Kind, Orders, Schedule
from ...trainer.layout.simulate import simulate

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

Hull = tuple[float, float, list[tuple[float, float]]]
"""Seconds and bytes of a kind's fastest choice; from it on the lower hull of the other choices, as
seconds for each byte saved, and bytes saved."""


class Choice(NamedTuple):
    """One way to run a layer."""

    backward: float
    """Seconds of a backward pass, with recomputation."""
    state: float = 0.0
    """Bytes for the whole step: state."""
    activations: float = 0.0
    """Bytes from the forward to the backward pass of each micro-batch."""
    workspace: float = 0.0
    """Bytes while a pass of this layer runs; of a stage's layers, one runs at a time."""
    name: Any = None
    """Label for the caller."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are alike."""

    forward: float
    choices: tuple[Choice, ...]
    update: float = 0.0
    """Seconds of a step outside the passes: messages and the optimizer."""
    module: int | None = None
    """Shared module that the layer calls."""

    @cached_property
    def workspaces(self) -> list[float]:
        """Work of the choices, in rising order."""
        return sorted(choice.workspace for choice in self.choices)

    @cached_property
    def hulls(self) -> dict[tuple[int, int], Hull | None]:
        """Hulls of the choices, by micro-batches alive and the number of choices whose work is
        within the limit."""
        return {}


@dataclass(frozen=True, kw_only=True)
class FixedCosts:
    """Costs without a choice: the embedding, the head, a shared module."""

    forward: float = 0.0
    backward: float = 0.0
    state: float = 0.0
    activations: float = 0.0
    workspace: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    """Kind of each layer."""
    micro_batches: int
    budget: float
    """Bytes of a rank."""
    stages: int = 1
    chunks: int = 1
    """Chunks of a stage."""
    schedule: Schedule = PLAIN
    message: float = 0.0
    """Seconds from a stage to the next."""
    first: FixedCosts = FixedCosts()
    """Added to the first chunk."""
    last: FixedCosts = FixedCosts()
    """Added to the last chunk."""
    modules: tuple[FixedCosts, ...] = ()
    """Shared modules: `state` and `update` count once on each stage that calls them."""
    reserved: tuple[float, ...] = ()
    """Bytes of each stage that are set aside: nothing of the problem may take them."""

    def __post_init__(self) -> None:
        assert self.stages * self.chunks <= len(self.layers), "each chunk has a layer"

    @property
    def all_chunks(self) -> int:
        return self.stages * self.chunks

    @cached_property
    def counts(self) -> Integers:
        """[layers + 1, kinds]: layers of each kind before each layer."""
        counts = np.zeros((len(self.layers) + 1, len(self.kinds)), dtype=np.int64)
        counts[np.arange(1, len(self.layers) + 1), self.layers] = 1
        return counts.cumsum(axis=0)

    @cached_property
    def layer_counts(self) -> list[int]:
        """Layers of each kind."""
        return [self.layers.count(kind) for kind in range(len(self.kinds))]

    @cached_property
    def called_modules(self) -> list[FixedCosts]:
        """Shared modules that a layer calls."""
        numbers = {self.kinds[kind].module for kind in set(self.layers)}
        return [module for number, module in enumerate(self.modules) if number in numbers]

    def stage_budget(self, stage: int) -> float:
        """Return the bytes of a rank of a stage."""
        return self.budget - (self.reserved[stage] if self.reserved else 0.0)

    def ranges(self, cuts: Cuts) -> list[tuple[int, int]]:
        """Return the first and the end of each chunk."""
        return list(pairwise((0, *cuts, len(self.layers))))

    def stage_chunks(self, stage: int) -> range:
        """Return the chunks of a stage."""
        return range(stage, self.all_chunks, self.stages)

    def end_costs(self, chunk: int) -> Iterator[FixedCosts]:
        if chunk == 0:
            yield self.first
        if chunk == self.all_chunks - 1:
            yield self.last

    def alive(self, stage: int) -> tuple[int, ...]:
        """Return the most micro-batches that each chunk of a stage has alive."""
        return alive(self.schedule, self.stages, self.chunks, self.micro_batches)[stage]

    @property
    def min_alive(self) -> int:
        """The least of all stages and chunks."""
        alive_by_stage = alive(self.schedule, self.stages, self.chunks, self.micro_batches)
        return min(min(chunks) for chunks in alive_by_stage)

    def orders(self) -> Orders:
        return orders(self.schedule, self.stages, self.chunks, self.micro_batches)


@lru_cache(maxsize=64)
def orders(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> Orders:
    return schedule.orders(stages, chunks, micro_batches)


@lru_cache(maxsize=4096)
def alive(
    schedule: Schedule, stages: int, chunks: int, micro_batches: int
) -> tuple[tuple[int, ...], ...]:
    """Return the most micro-batches alive in each chunk, by stage."""
    return tuple(
        schedule.in_flight(stage, stages, chunks, micro_batches) for stage in range(stages)
    )


@dataclass(frozen=True)
class StagePlan:
    """The choices of a stage, and their costs."""

    forward: tuple[float, ...]
    """Seconds of each chunk of the stage."""
    backward: tuple[float, ...]
    update: float
    memory: float
    counts: tuple[tuple[tuple[int, ...], ...], ...]
    """Layers of each chunk, by kind, by choice."""


@dataclass(frozen=True)
class Solution:
    """A division with its choices, priced by events."""

    price: float
    cuts: Cuts
    stages: tuple[StagePlan, ...]
    bound: float
    """No solution of the problem costs less: equal to the price where the search was complete."""


def price(problem: Problem, stages: Sequence[StagePlan]) -> float:
    """Simulate a step."""
    costs: dict[Kind, list[float]] = {
        "forward": [0.0] * problem.all_chunks,
        "backward": [0.0] * problem.all_chunks,
    }
    for stage, plan in enumerate(stages):
        for chunk, forward, backward in zip(
            problem.stage_chunks(stage), plan.forward, plan.backward, strict=True
        ):
            costs["forward"][chunk], costs["backward"][chunk] = forward, backward
    if problem.stages == 1 and problem.chunks == 1:
        # One stage never waits.
        passes = costs["forward"][0] + costs["backward"][0]
        return problem.micro_batches * passes + stages[0].update
    timeline = simulate(problem.orders(), costs, problem.message)
    ends = (spans[-1].end for spans in timeline.spans)
    return max(end + plan.update for end, plan in zip(ends, stages, strict=True))
