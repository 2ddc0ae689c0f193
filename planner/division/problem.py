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

    def bytes(self, in_flight: float) -> float:
        """Return the bytes without workspace, with so many micro-batches in flight."""
        return self.state + in_flight * self.activations


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
    def fastest(self) -> float:
        """Seconds of both passes with the fastest choice."""
        return self.forward + min(choice.backward for choice in self.choices)

    @cached_property
    def workspaces(self) -> list[float]:
        """Workspaces of the choices, in rising order."""
        return sorted(choice.workspace for choice in self.choices)

    @cached_property
    def hulls(self) -> dict[tuple[float, int], Any]:
        """Hulls (choices.py) by micro-batches in flight and the number of choices within a
        workspace limit."""
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

    @property
    def layer(self) -> LayerKind:
        """The same as a kind of layer with one choice."""
        choice = Choice(self.backward, self.state, self.activations, self.workspace)
        return LayerKind(forward=self.forward, choices=(choice,), update=self.update)


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
    def all_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of layers, then the ends: they are layers of their own kinds."""
        return (*self.kinds, self.first.layer, self.last.layer)

    @cached_property
    def counts(self) -> Integers:
        """[layers + 1, all kinds]: number of layers by kind before every layer. The ends count with
        the first and the last layer."""
        counts = np.zeros((len(self.layers) + 1, len(self.all_kinds)), dtype=np.int64)
        counts[np.arange(1, len(self.layers) + 1), self.layers] = 1
        counts[1, -2] = counts[-1, -1] = 1
        return counts.cumsum(axis=0)

    def called_modules(self, kinds: Iterable[LayerKind]) -> list[FixedCosts]:
        """Return the shared modules that layers of these kinds call."""
        numbers = {kind.module for kind in kinds}
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
    choices: tuple[tuple[tuple[Choice, ...], ...], ...] = ()
    """Choices of the layers, by chunk and kind; layers of a kind are alike."""

    @property
    def passes(self) -> list[float]:
        """Seconds of both passes, by chunk."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch's passes."""
        return sum(self.forward) + sum(self.backward)


def cost_stage(
    problem: Problem, stage: int, chunks: Sequence[Iterable[tuple[LayerKind, Choice]]]
) -> StagePlan:
    """Return the costs of a stage whose chunks have these layers, without choices."""
    forward, backward, update, memory, workspace = [], [], 0.0, 0.0, 0.0
    kinds: dict[int, LayerKind] = {}
    for chunk, in_flight, layers in zip(
        problem.stage_chunks(stage), problem.in_flight(stage), chunks, strict=True
    ):
        ends = [end.layer for end in problem.end_costs(chunk)]
        pairs = [*layers, *((end, end.choices[0]) for end in ends)]
        forward.append(sum(kind.forward for kind, _ in pairs))
        backward.append(sum(choice.backward for _, choice in pairs))
        update += sum(kind.update for kind, _ in pairs)
        memory += sum(choice.bytes(in_flight) for _, choice in pairs)
        workspace = max(workspace, *(choice.workspace for _, choice in pairs))
        kinds.update((id(kind), kind) for kind, _ in pairs)
    modules = problem.called_modules(kinds.values())
    return StagePlan(
        forward=tuple(forward),
        backward=tuple(backward),
        update=update + sum(module.update for module in modules),
        memory=memory + workspace + sum(module.state for module in modules),
    )


@dataclass(frozen=True)
class Division:
    """Cuts with a choice for every layer, and their price."""

    price: float
    cuts: Cuts
    choices: tuple[Choice, ...]
    """By layer."""
    stages: tuple[StagePlan, ...]

    def bounded(self, bound: float) -> Solution:
        """Return the division with a lower bound, at most its price, on the price of all."""
        return Solution(self.price, self.cuts, self.choices, self.stages, min(bound, self.price))


@dataclass(frozen=True)
class Solution(Division):
    """The best division that a search has found."""

    bound: float
    """Lower bound on every division's price."""


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


def price_division(problem: Problem, cuts: Cuts, choices: Sequence[Choice]) -> Division:
    """Price a division; `choices` has one for every layer."""
    layers = [
        (problem.kinds[kind], choice) for kind, choice in zip(problem.layers, choices, strict=True)
    ]
    chunks = [layers[slice(*layer_range)] for layer_range in problem.ranges(cuts)]
    stages = tuple(
        cost_stage(problem, stage, chunks[stage :: problem.stages])
        for stage in range(problem.stages)
    )
    return Division(price(problem, stages), cuts, tuple(choices), stages)
