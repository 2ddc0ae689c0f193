"""Lower bounds on the memory of every plan of a layout: sums at one moment of the step.

Engines, shards and schedules decide most of a rank's memory. Those bytes add up over the parts of
a stage without a trace (memory/part_memory.py). When a stage has the most micro-batches in flight,
each holds at least the smallest activations of its layers under any recompute rule. Every sum is
below the timeline at that moment, and so below the plan's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from ....trainer.layout.cuts import Cuts
from ....trainer.layout.schedules import FullestMoment, Schedule
from ...grid.grid import Grid
from ...memory.part_memory import PartMemory
from ...memory.parts import PartTable

ROUNDING = 64
"""Bytes by which rounded-up shards of a part may exceed its share of the sum."""
Ranges = Sequence[tuple[int, int]]
"""First and end layer, by chunk of a stage."""


@dataclass(frozen=True)
class MinActivations:
    """Lower bounds on bytes per micro-batch over all recompute rules."""

    kinds: Sequence[float]
    """Activations of a layer, by kind."""
    workspaces: Sequence[float]
    """Bytes that the backward pass of a layer adds at its peak, by kind."""
    first: float = 0.0
    last: float = 0.0
    last_workspace: float = 0.0


@lru_cache(maxsize=4096)
def fullest_moment(
    schedule: Schedule, stages: int, chunks: int, micro_batches: int, stage: int
) -> FullestMoment:
    return schedule.fullest_moment(stage, stages, chunks, micro_batches)


class Floors:
    """Lower bounds on the memory of a layout's stages."""

    def __init__(
        self,
        grid: Grid,
        layers: Sequence[int],
        calls: Sequence[str | None],
        parts: PartTable[PartMemory],
        activations: MinActivations | None = None,
    ) -> None:
        """`layers` has the kind of every layer, `calls` the shared module that every kind calls."""
        self.grid, self.layers, self.parts = grid, layers, parts
        zeros = [0.0] * len(parts.layers)
        self.activations = activations or MinActivations(zeros, zeros)
        self.called = [calls[kind] for kind in layers]
        layout = grid.layout
        self.stages, self.chunks = layout.pp, layout.chunks
        self.moments = [0, 1, 2] if grid.shape.micro_batches > 1 else [0, 2]
        """Fields of `PartMemory` that are moments of the step."""

    @cached_property
    def _state_sums(self) -> list[list[float]]:
        """[moment][layer]: bytes of all layers before."""
        layers = [self.parts.layers[kind] for kind in self.layers]
        return [
            list(accumulate((layer[m] - ROUNDING for layer in layers), initial=0.0))
            for m in (0, 1, 2)
        ]

    @cached_property
    def _activation_sums(self) -> list[float]:
        return list(accumulate((self.activations.kinds[kind] for kind in self.layers), initial=0.0))

    def fullest(self, stage: int) -> FullestMoment:
        layout = self.grid.layout
        micro = self.grid.shape.micro_batches
        return fullest_moment(layout.pipeline_schedule, layout.pp, layout.chunks, micro, stage)

    def stage(self, stage: int, ranges: Ranges) -> float:
        """Return the lower bound for a stage whose chunks have these layers."""
        last = self.stages * self.chunks - 1
        ends: list[PartMemory] = []
        kept = 0.0
        moment = self.fullest(stage)
        for number, (alive, (first, end)) in enumerate(zip(moment.in_flight, ranges, strict=False)):
            chunk = stage + number * self.stages
            kept += alive * (self._activation_sums[end] - self._activation_sums[first])
            if chunk == 0:
                ends.append(self.parts.first)
                kept += alive * self.activations.first
            if chunk == last:
                ends.append(self.parts.last)
                kept += alive * self.activations.last
            if number == moment.next:
                kind = self.layers[end - 1]
                workspace = self.activations.workspaces[kind] + self.parts.layers[kind].gathered
                kept += self.activations.last_workspace if chunk == last else workspace
        called = {module for first, end in ranges for module in self.called[first:end]}
        ends += [self.parts.modules[module] for module in called if module is not None]
        floor = 0.0
        for index in self.moments:
            sums = self._state_sums[index]
            size = sum(sums[end] - sums[first] for first, end in ranges)
            size += sum(part[index] - ROUNDING for part in ends)
            floor = max(floor, size + (kept if index == 0 else 0.0))
        return floor

    @cached_property
    def mean(self) -> float:
        """Lower bound on the fullest stage: the mean over stages, with every module once."""
        min_in_flight = min(min(self.fullest(stage).in_flight) for stage in range(self.stages))
        activations = self._activation_sums[-1] + self.activations.first + self.activations.last
        kept = min_in_flight * activations
        workspaces = [
            self.activations.workspaces[kind] + self.parts.layers[kind].gathered
            for kind in {*self.layers}
        ]
        smallest_last = min(*workspaces, self.activations.last_workspace)
        kept += (self.stages - 1) * min(workspaces) + smallest_last
        ends = [self.parts.first, self.parts.last]
        ends += [self.parts.modules[module] for module in {*self.called} - {None} if module]
        return (
            max(
                self._state_sums[moment][-1]
                + sum(part[moment] - ROUNDING for part in ends)
                + (kept if moment == 0 else 0.0)
                for moment in self.moments
            )
            / self.stages
        )

    def may_fit(self, budget: float) -> bool:
        """Return False if every division has a stage whose lower bound exceeds the budget."""
        if self.mean > budget:
            return False
        if self.stages == 1 or self.chunks > 1:
            return True
        return (
            cut_greedily(
                self.stages, len(self.layers), lambda *at: self.stage(at[0], [at[1:]]) <= budget
            )
            is not None
        )


def cut_greedily(stages: int, layers: int, fits: Callable[[int, int, int], bool]) -> Cuts | None:
    """Return cuts into stages that fit; None if there are none.

    `fits(stage, first, end)` is monotone: fewer layers fit where more do. So every stage takes as
    many layers as it can.
    """
    cuts: list[int] = []
    first = 0
    for stage in range(stages - 1):
        low, high = first, layers - (stages - 1 - stage)
        while low < high:
            middle = (low + high + 1) // 2
            if fits(stage, first, middle):
                low = middle
            else:
                high = middle - 1
        if low == first:
            return None
        cuts.append(first := low)
    return tuple(cuts) if fits(stages - 1, first, layers) else None


def interleaved_cuts(floors: Floors, budget: float, max_tried: int) -> Iterator[Cuts | None]:
    """Yield the cuts of an interleaved schedule whose lower bounds are within the budget.

    Yield None if the search stops early, after `max_tried` partial cuts.
    """
    layers, chunks = len(floors.layers), floors.stages * floors.chunks
    todo: list[Cuts] = [(0,)]
    tried = 0
    while todo:
        if tried >= max_tried:
            yield None
            return
        tried += 1
        done = todo.pop()
        chunk = len(done) - 1
        if chunk == chunks:
            yield done[1:-1]
            continue
        stage, first, chunks_after = chunk % floors.stages, done[-1], chunks - chunk - 1
        stage_ranges = [(done[n], done[n + 1]) for n in range(stage, chunk, floors.stages)]
        for end in range(first + 1, layers - chunks_after + 1) if chunks_after else [layers]:
            if floors.stage(stage, [*stage_ranges, (first, end)]) > budget:
                break
            todo.append((*done, end))
