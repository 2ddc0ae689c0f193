"""A planning problem in numbers: layers by kind, stages, a schedule, a memory budget.

A *division* cuts the layers into chunks. A *choice* says how a layer runs: what it recomputes and
saves. The price of both is a simulated step's time:

    price = max over stages (end of the stage's last pass + its update)

A kind's choices differ in the backward pass alone, where recomputation and second gathers run. So
among choices that fit into memory, those with the shortest backward time are best, whatever the
remaining stages do: a longer pass never shortens a schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...trainer.layout.cuts import Cuts
from ...trainer.layout.schedules import PLAIN, FullestMoment, Schedule
from ...trainer.layout.simulate import LinkedPasses, link_passes, step_ends

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Hull(NamedTuple):
    """Lower hull of a kind's choices in bytes and seconds, fastest first."""

    choices: Sequence[int]
    """Numbers of the choices."""
    seconds: float
    """Seconds of the fastest."""
    bytes: float
    segments: Sequence[tuple[float, float]]
    """Between neighbours: seconds per byte saved, and bytes saved. Rates rise."""


class Choice(NamedTuple):
    """One way to run a layer."""

    backward: float
    """Seconds of a backward pass, with recomputation."""
    state: float = 0.0
    """Bytes for the whole step: state."""
    activations: float = 0.0
    """Bytes per micro-batch, from its forward to its backward pass."""
    workspace: float = 0.0
    """Bytes while this layer runs; a stage runs one layer at a time."""
    name: Any = None
    """Label for the caller."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that are alike."""

    forward: float
    choices: tuple[Choice, ...]
    update: float = 0.0
    """Seconds outside the passes, once per step: messages and the optimizer."""
    module: int | None = None
    """Shared module that the layer calls."""

    @cached_property
    def workspaces(self) -> list[float]:
        """Workspaces of the choices, in rising order."""
        return sorted(choice.workspace for choice in self.choices)

    @cached_property
    def hulls(self) -> dict[tuple[float, int], Hull | None]:
        """Hulls by micro-batches in flight and the number of choices within a workspace limit."""
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
    """Kind of every layer."""
    micro_batches: int
    budget: float
    """Bytes per rank."""
    stages: int = 1
    chunks: int = 1
    """Chunks per stage."""
    schedule: Schedule = PLAIN
    message: float = 0.0
    """Seconds from one stage to the next."""
    first: FixedCosts = FixedCosts()
    """Added to the first chunk."""
    last: FixedCosts = FixedCosts()
    """Added to the last chunk."""
    modules: tuple[FixedCosts, ...] = ()
    """Shared modules: `state` and `update` count once on every stage that calls them."""
    reserved: tuple[float, ...] = ()
    """Bytes by stage that are set aside: the problem may not use them."""

    def __post_init__(self) -> None:
        assert self.stages * self.chunks <= len(self.layers), "each chunk has a layer"

    @property
    def all_chunks(self) -> int:
        return self.stages * self.chunks

    @cached_property
    def counts(self) -> Integers:
        """[layers + 1, kinds]: number of layers by kind before every layer."""
        counts = np.zeros((len(self.layers) + 1, len(self.kinds)), dtype=np.int64)
        counts[np.arange(1, len(self.layers) + 1), self.layers] = 1
        return counts.cumsum(axis=0)

    @cached_property
    def layer_counts(self) -> list[int]:
        """Number of layers by kind."""
        return [self.layers.count(kind) for kind in range(len(self.kinds))]

    def called_modules(self, kinds: Iterable[int]) -> list[FixedCosts]:
        """Return the shared modules that layers of these kinds call."""
        numbers = {self.kinds[kind].module for kind in kinds}
        return [module for number, module in enumerate(self.modules) if number in numbers]

    def stage_budget(self, stage: int) -> float:
        """Return the bytes per rank on a stage."""
        return self.budget - (self.reserved[stage] if self.reserved else 0.0)

    def ranges(self, cuts: Cuts) -> list[tuple[int, int]]:
        """Return first and end layer, by chunk."""
        return list(pairwise((0, *cuts, len(self.layers))))

    def stage_chunks(self, stage: int) -> range:
        """Return the chunks of a stage."""
        return range(stage, self.all_chunks, self.stages)

    def end_costs(self, chunk: int) -> Iterator[FixedCosts]:
        if chunk == 0:
            yield self.first
        if chunk == self.all_chunks - 1:
            yield self.last

    def in_flight(self, stage: int) -> tuple[int, ...]:
        """Return the micro-batches in flight at a stage's fullest moment, by chunk."""
        moments = fullest_moments(self.schedule, self.stages, self.chunks, self.micro_batches)
        return moments[stage].in_flight

    @property
    def min_in_flight(self) -> int:
        """Minimum over stages and chunks."""
        return min(min(self.in_flight(stage)) for stage in range(self.stages))


@lru_cache(maxsize=32)
def link(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> LinkedPasses:
    return link_passes(schedule.orders(stages, chunks, micro_batches), stages * chunks)


@lru_cache(maxsize=4096)
def fullest_moments(
    schedule: Schedule, stages: int, chunks: int, micro_batches: int
) -> tuple[FullestMoment, ...]:
    """Return the moment with most micro-batches in flight, by stage."""
    return tuple(
        schedule.fullest_moment(stage, stages, chunks, micro_batches) for stage in range(stages)
    )


@dataclass(frozen=True)
class StagePlan:
    """A stage's costs, and the choices of its layers."""

    forward: tuple[float, ...]
    """Seconds by chunk of the stage."""
    backward: tuple[float, ...]
    update: float
    memory: float
    counts: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Number of layers by chunk, kind and choice."""

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch's passes."""
        return sum(self.forward) + sum(self.backward)


LayerChoices = Sequence[tuple[int, Choice, int]]
"""Kinds of layers, their choice, and the number of layers that make it."""


def cost_stage(problem: Problem, stage: int, chunks: Sequence[LayerChoices]) -> StagePlan:
    """Return the costs of a stage whose chunks have these layers."""
    in_flight = problem.in_flight(stage)
    chunk_ends = [list(problem.end_costs(chunk)) for chunk in problem.stage_chunks(stage)]
    layers = [group for groups in chunks for group in groups]
    ends = [end for ends in chunk_ends for end in ends]
    modules = problem.called_modules(kind for kind, *_ in layers)
    costs: list[list[tuple[Choice | FixedCosts, int]]] = [
        [*((choice, count) for _, choice, count in groups), *((end, 1) for end in ends)]
        for groups, ends in zip(chunks, chunk_ends, strict=True)
    ]
    state = sum(count * cost.state for pairs in costs for cost, count in pairs)
    activations = sum(
        n * count * cost.activations
        for n, pairs in zip(in_flight, costs, strict=True)
        for cost, count in pairs
    )
    return StagePlan(
        forward=tuple(
            sum(count * problem.kinds[kind].forward for kind, _, count in groups)
            + sum(end.forward for end in ends)
            for groups, ends in zip(chunks, chunk_ends, strict=True)
        ),
        backward=tuple(sum(count * cost.backward for cost, count in pairs) for pairs in costs),
        update=sum(count * problem.kinds[kind].update for kind, _, count in layers)
        + sum(end.update for end in ends)
        + sum(module.update for module in modules),
        memory=state
        + sum(module.state for module in modules)
        + activations
        + max(cost.workspace for pairs in costs for cost, _ in pairs),
    )


@dataclass(frozen=True)
class Solution:
    """A division with its choices, priced by events."""

    price: float
    cuts: Cuts
    stages: tuple[StagePlan, ...]
    bound: float
    """Lower bound on every solution's price."""


def price(problem: Problem, stages: Sequence[StagePlan]) -> float:
    """Simulate a step."""
    if problem.stages == 1 and problem.chunks == 1:  # one stage never waits
        [plan] = stages
        passes = plan.forward[0] + plan.backward[0]
        return problem.micro_batches * passes + plan.update
    columns = [plan.forward for plan in stages], [plan.backward for plan in stages]
    costs = [seconds for column in columns for row in zip(*column, strict=True) for seconds in row]
    links = link(problem.schedule, problem.stages, problem.chunks, problem.micro_batches)
    ends = step_ends(links, costs, problem.message, problem.stages)
    return max(end + plan.update for end, plan in zip(ends, stages, strict=True))
