"""Bytes below which no plan of a layout stays: sums that hold at one moment of the step.

Engines, shards and schedules decide most of a rank's memory, and those bytes add up over layers
without a trace (`Lasting`). At the moment when a stage has most micro-batches alive, each of them
keeps what its layers keep at least, under any recompute rule. Every sum is below the level of the
timeline at that moment, and so below the memory of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from ....trainer.layout.cuts import Cuts
from ....trainer.layout.schedules import FullestMoment, Schedule
from ...grid.grid import Grid
from ...memory.rank_memory import Lasting, LastingParts

ROUNDING = 64
"""Bytes by which the sum of a part's shards may exceed its share of the sum: engines round up."""
Ranges = Sequence[tuple[int, int]]
"""First and end of each chunk of a stage."""


@dataclass(frozen=True)
class Kept:
    """Least bytes that parts of the model keep of a micro-batch and work with, whatever is
    recomputed."""

    sorts: Sequence[float]
    works: Sequence[float]
    """Bytes that the backward pass of a layer adds at least at its highest moment."""
    first: float = 0.0
    last: float = 0.0
    last_work: float = 0.0


@lru_cache(maxsize=4096)
def fullest_moment(
    schedule: Schedule, stages: int, chunks: int, micro_batches: int, stage: int
) -> FullestMoment:
    return schedule.fullest_moment(stage, stages, chunks, micro_batches)


class Floors:
    """Floors of the stages of a layout."""

    def __init__(
        self,
        grid: Grid,
        layers: Sequence[int],
        calls: Sequence[str | None],
        lasting: LastingParts,
        kept: Kept | None = None,
    ) -> None:
        """`layers` have the sort of each layer, `calls` the shared module that each sort calls."""
        self.grid, self.layers, self.lasting = grid, layers, lasting
        self.kept = kept or Kept([0.0] * len(lasting.layers), [0.0] * len(lasting.layers))
        self.called = [calls[sort] for sort in layers]
        layout = grid.layout
        self.stages, self.chunks = layout.pp, layout.chunks
        self.moments = [0, 1, 2] if grid.shape.micro_batches > 1 else [0, 2]
        """Moments of `Lasting` that the step has."""

    @cached_property
    def _sums(self) -> list[list[float]]:
        """Bytes of the layers before each layer, by moment."""
        each = [self.lasting.layers[sort] for sort in self.layers]
        return [
            list(accumulate((one[m] - ROUNDING for one in each), initial=0.0)) for m in (0, 1, 2)
        ]

    @cached_property
    def _kept(self) -> list[float]:
        return list(accumulate((self.kept.sorts[sort] for sort in self.layers), initial=0.0))

    def fullest(self, stage: int) -> FullestMoment:
        layout = self.grid.layout
        micro = self.grid.shape.micro_batches
        return fullest_moment(layout.pipeline_schedule, layout.pp, layout.chunks, micro, stage)

    def stage(self, stage: int, ranges: Ranges) -> float:
        """Return the floor of a stage whose chunks have these layers."""
        last = self.stages * self.chunks - 1
        ends: list[Lasting] = []
        kept = 0.0
        moment = self.fullest(stage)
        for number, (alive, (first, end)) in enumerate(zip(moment.in_flight, ranges, strict=False)):
            chunk = stage + number * self.stages
            kept += alive * (self._kept[end] - self._kept[first])
            if chunk == 0:
                ends.append(self.lasting.first)
                kept += alive * self.kept.first
            if chunk == last:
                ends.append(self.lasting.last)
                kept += alive * self.kept.last
            if number == moment.next:
                sort = self.layers[end - 1]
                work = self.kept.works[sort] + self.lasting.layers[sort].running
                kept += self.kept.last_work if chunk == last else work
        names = {name for first, end in ranges for name in self.called[first:end]} - {None}
        ends += [self.lasting.modules[name] for name in names if name is not None]
        found = 0.0
        for number in self.moments:
            sums = self._sums[number]
            size = sum(sums[end] - sums[first] for first, end in ranges)
            size += sum(each[number] - ROUNDING for each in ends)
            found = max(found, size + (kept if number == 0 else 0.0))
        return found

    @cached_property
    def mean(self) -> float:
        """Bytes of the fullest stage at least: the mean of all of them, with modules once."""
        least = [min(self.fullest(stage).in_flight) for stage in range(self.stages)]
        kept = min(least) * (self._kept[-1] + self.kept.first + self.kept.last)
        works = [
            self.kept.works[sort] + self.lasting.layers[sort].running for sort in {*self.layers}
        ]
        kept += (self.stages - 1) * min(works) + min(*works, self.kept.last_work)
        ends = [self.lasting.first, self.lasting.last]
        ends += [self.lasting.modules[name] for name in {*self.called} - {None} if name]
        return (
            max(
                self._sums[moment][-1]
                + sum(each[moment] - ROUNDING for each in ends)
                + (kept if moment == 0 else 0.0)
                for moment in self.moments
            )
            / self.stages
        )

    def may_fit(self, budget: float) -> bool:
        """Return False if no division has all of its floors within the budget."""
        if self.mean > budget:
            return False
        if self.stages == 1 or self.chunks > 1:
            return True
        return (
            farthest(
                self.stages, len(self.layers), lambda *at: self.stage(at[0], [at[1:]]) <= budget
            )
            is not None
        )


def farthest(stages: int, layers: int, fits: Callable[[int, int, int], bool]) -> Cuts | None:
    """Return cuts into stages that fit; None without them. `fits` of a stage, its first layer and
    its end; fewer layers fit where more of them do. So each stage takes as many as it can."""
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


def interleaved_cuts(floors: Floors, budget: float, most: int) -> Iterator[Cuts | None]:
    """Yield the cuts of an interleaved schedule whose floors are within the budget. Yield None at
    the end if `most` beginnings of cuts were tried, and others are left."""
    layers, chunks = len(floors.layers), floors.stages * floors.chunks
    todo: list[Cuts] = [(0,)]
    tried = 0
    while todo:
        if tried >= most:
            yield None
            return
        tried += 1
        done = todo.pop()
        chunk = len(done) - 1
        if chunk == chunks:
            yield done[1:-1]
            continue
        stage, first, rest = chunk % floors.stages, done[-1], chunks - chunk - 1
        own = [(done[n], done[n + 1]) for n in range(stage, chunk, floors.stages)]
        for end in range(first + 1, layers - rest + 1) if rest else [layers]:
            if floors.stage(stage, [*own, (first, end)]) > budget:
                break
            todo.append((*done, end))
