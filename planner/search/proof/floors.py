"""Lower bounds on memory for every plan in a layout: sums at a single moment in the step.

Engines, shards and schedules decide most memory on a rank. Those bytes add up over a stage's parts
without a trace (memory/part_memory.py). When a stage has the most micro-batches in flight, each
holds at least its layers' smallest activations under any recompute rule. Every sum is below the
timeline at that moment, and so below the plan's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ....trainer.layout.cuts import Cuts
from ....trainer.layout.schedules import FullestMoment
from ...division.problem import fullest_moments
from ...grid.grid import Grid
from ...memory.part_memory import PartMemory
from ...memory.parts import PartTable

ROUNDING = 64
"""Bytes by which a part's rounded-up shards may exceed its share in the sum."""
Ranges = Sequence[tuple[int, int]]
"""First and end layer, by chunk in a stage."""


@dataclass(frozen=True)
class MinActivations:
    """Lower bounds on bytes per micro-batch over all recompute rules."""

    kinds: Sequence[float]
    """Activations per layer, by kind."""
    workspaces: Sequence[float]
    """Bytes that a layer's backward pass adds at its peak, by kind."""
    first: float = 0.0
    last: float = 0.0
    last_workspace: float = 0.0


class Floors:
    """Lower bounds on memory for a layout's stages."""

    def __init__(
        self,
        grid: Grid,
        layers: Sequence[int],
        kind_modules: Sequence[str | None],
        parts: PartTable[PartMemory],
        activations: MinActivations | None = None,
    ) -> None:
        """`layers` has the kind by layer, `kind_modules` the shared module that a kind calls."""
        self.grid, self.layers, self.parts = grid, layers, parts
        zeros = [0.0] * len(parts.layers)
        self.activations = activations or MinActivations(zeros, zeros)
        self.layer_modules = [kind_modules[kind] for kind in layers]
        """Shared modules by layer."""
        layout = grid.layout
        self.stages, self.chunks = layout.pp, layout.chunks
        self.moments = [0, 1, 2] if grid.shape.micro_batches > 1 else [0, 2]
        """Fields in `PartMemory` that are moments in the step."""

    @cached_property
    def _state_sums(self) -> list[list[float]]:
        """[moment][layer]: bytes in all layers before."""
        layers = [self.parts.layers[kind] for kind in self.layers]
        return [
            list(accumulate((layer[m] - ROUNDING for layer in layers), initial=0.0))
            for m in (0, 1, 2)
        ]

    @cached_property
    def _activation_sums(self) -> list[float]:
        return list(accumulate((self.activations.kinds[kind] for kind in self.layers), initial=0.0))

    def find_fullest_moment(self, stage: int) -> FullestMoment:
        layout, shape = self.grid.layout, self.grid.shape
        schedule = layout.pipeline_schedule
        moments = fullest_moments(schedule, layout.pp, layout.chunks, shape.micro_batches)
        return moments[stage]

    def stage(self, stage: int, ranges: Ranges) -> float:
        """Return the lower bound for a stage whose chunks have these layers."""
        last = self.stages * self.chunks - 1
        ends: list[PartMemory] = []
        fullest_bytes = 0.0  # activations and a workspace, at the fullest moment
        moment = self.find_fullest_moment(stage)
        for number, (in_flight, (first, end)) in enumerate(
            zip(moment.in_flight, ranges, strict=False)
        ):
            chunk = stage + number * self.stages
            fullest_bytes += in_flight * (self._activation_sums[end] - self._activation_sums[first])
            if chunk == 0:
                ends.append(self.parts.first)
                fullest_bytes += in_flight * self.activations.first
            if chunk == last:
                ends.append(self.parts.last)
                fullest_bytes += in_flight * self.activations.last
            if number == moment.next:
                kind = self.layers[end - 1]
                workspace = self.activations.workspaces[kind] + self.parts.layers[kind].gathered
                fullest_bytes += self.activations.last_workspace if chunk == last else workspace
        names = {name for first, end in ranges for name in self.layer_modules[first:end]}
        modules = [self.parts.modules[name] for name in names if name is not None]
        floor = 0.0
        for index in self.moments:
            sums = self._state_sums[index]
            size = sum(sums[end] - sums[first] for first, end in ranges)
            size += sum(memory[index] - ROUNDING for memory in (*ends, *modules))
            floor = max(floor, size + (fullest_bytes if index == 0 else 0.0))
        return floor

    @cached_property
    def mean(self) -> float:
        """Lower bound on the fullest stage: the mean over stages, with every module once."""
        min_in_flight = min(
            min(self.find_fullest_moment(stage).in_flight) for stage in range(self.stages)
        )
        activations = self._activation_sums[-1] + self.activations.first + self.activations.last
        fullest_bytes = min_in_flight * activations
        workspaces = [
            self.activations.workspaces[kind] + self.parts.layers[kind].gathered
            for kind in {*self.layers}
        ]
        smallest_last = min(*workspaces, self.activations.last_workspace)
        fullest_bytes += (self.stages - 1) * min(workspaces) + smallest_last
        ends = [self.parts.first, self.parts.last]
        modules = [self.parts.modules[name] for name in {*self.layer_modules} if name is not None]
        floor = max(
            self._state_sums[moment][-1]
            + sum(memory[moment] - ROUNDING for memory in (*ends, *modules))
            + (fullest_bytes if moment == 0 else 0.0)
            for moment in self.moments
        )
        return floor / self.stages

    def may_fit(self, budget: float) -> bool:
        """Return False if every division has a stage whose lower bound exceeds the budget."""
        if self.mean > budget:
            return False
        if self.stages == 1 or self.chunks > 1:
            return True

        def fits(stage: int, first: int, end: int) -> bool:
            return self.stage(stage, [(first, end)]) <= budget

        return cut_greedily(self.stages, len(self.layers), fits) is not None


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
    """Yield cuts for an interleaved schedule with lower bounds within the budget.

    Yield None if the search stops early, after `max_tried` partial cuts.
    """
    layers, chunks = len(floors.layers), floors.stages * floors.chunks
    stack: list[Cuts] = [(0,)]
    num_tried = 0
    while stack:
        if num_tried >= max_tried:
            yield None
            return
        num_tried += 1
        ends = stack.pop()
        chunk = len(ends) - 1
        if chunk == chunks:
            yield ends[1:-1]
            continue
        stage, first, chunks_after = chunk % floors.stages, ends[-1], chunks - chunk - 1
        stage_ranges = [(ends[n], ends[n + 1]) for n in range(stage, chunk, floors.stages)]
        for end in range(first + 1, layers - chunks_after + 1) if chunks_after else [layers]:
            if floors.stage(stage, [*stage_ranges, (first, end)]) > budget:
                break
            stack.append((*ends, end))
