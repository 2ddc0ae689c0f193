"""Cut the layers into chunks by a dynamic program.

The slowest stage of its cuts is the fastest, by the times of linear programming (choices.py). The
program sees a stage as if all its chunks were alike, which is exact for one chunk per stage: its
result is then a lower bound on the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ...trainer.layout.cuts import Cuts
from .choices import price_overflow
from .problem import Flags, Integers, Numbers, StagePlan
from .stages import Stages

TIE = 1e-6
"""Part of the step by which times are equal."""


class Start(NamedTuple):
    """Where the search for a division begins."""

    estimate: float
    """Seconds of the step; a lower bound if stages have one chunk."""
    cuts: Cuts


class RangeTimes(NamedTuple):
    """Seconds of a stage's layers if it has the range [first, end)."""

    forward: Numbers
    backward: Numbers
    """Infinite for ranges that are no chunk."""
    update: Numbers
    """Outside the passes, with those of the ends."""


@lru_cache(maxsize=64)
def _count_ranges(
    layers: tuple[int, ...], num_kinds: int, chunks: int
) -> tuple[Integers, Integers, Flags]:
    """Count the layers by kind in all ranges [first, end) that may be a chunk.

    Return the distinct counts [rows, kinds]; the row of every range [first, end]; and a flag for
    ranges that are no chunk. Many ranges share a row: times are computed by row.
    """
    one_hot = np.eye(num_kinds, dtype=np.int64)[list(layers)]
    prefix = np.concatenate([np.zeros((1, num_kinds), dtype=np.int64), one_hot.cumsum(axis=0)])
    ends = np.arange(len(prefix))
    lengths = ends - ends[:, None]
    num_neighbours = (ends[:, None] > 0).astype(np.int64) + (ends < len(layers))
    invalid = (lengths <= 0) | (lengths > len(layers) - chunks + 1) | (num_neighbours >= chunks)
    between = np.where(invalid[:, :, None], 0, prefix[None, :, :] - prefix[:, None, :])
    counts, row = np.unique(between.reshape(-1, num_kinds), axis=0, return_inverse=True)
    return counts, row.reshape(invalid.shape), invalid


class Program:
    """A dynamic program over the chunks of a problem."""

    def __init__(self, stages: Stages) -> None:
        self.stages, self.problem = stages, stages.problem

    def run(self) -> Start:
        """Return the cuts with the shortest step."""
        problem = self.problem
        p, m, chunks, layers = (
            problem.stages, problem.micro_batches, problem.all_chunks, len(problem.layers),
        )  # fmt: skip
        remaining, trips = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
        """By the first layer of the chunks that remain: bound on the seconds from the first pass of
        a stage to the end of the step, and seconds of a micro-batch to the last chunk and back."""
        remaining[layers] = trips[layers] = 0.0
        ends: list[Integers] = []
        for chunk in reversed(range(chunks)):
            table = self._tables[chunk % p]
            fixed = list(problem.end_costs(chunk))
            backward = table.backward + problem.chunks * sum(end.backward for end in fixed)
            passes = table.forward + problem.chunks * sum(end.forward for end in fixed) + backward
            hop = 2 * problem.message if chunk < chunks - 1 else 0.0
            trip = passes + hop + trips
            if problem.chunks > 1:
                step = np.maximum(m * passes, remaining)
            else:
                fits = np.isfinite(trip)
                alone = problem.schedule.bound(
                    m, p - chunk, np.where(fits, passes, 0.0), np.where(fits, backward, 0.0),
                    np.where(fits, trip, 0.0),
                )  # fmt: skip
                step = np.maximum(np.where(fits, alone, np.inf), passes + hop + remaining)
            if chunk == 0:
                step = step + table.update
            # Of equal steps, the chunk that is nearest to the mean of those that remain is best.
            uneven = np.abs(
                passes - problem.chunks * self._fastest_passes[:, None] / (chunks - chunk)
            )
            ends.append((step + TIE * m * uneven).argmin(axis=1))
            remaining, trips = step.min(axis=1), trip.min(axis=1)
        first, cuts = 0, []
        for end in reversed(ends):
            first = int(end[first])
            cuts.append(first)
        return Start(float(remaining[0]), tuple(cuts[:-1]))

    def balance_cuts(self) -> Cuts:
        """Return cuts into chunks of nearly equal seconds."""
        passes, chunks = self._fastest_passes, self.problem.all_chunks
        layers, cuts = len(self.problem.layers), [0]
        for chunk in range(1, chunks):
            near = int(np.searchsorted(-passes, -passes[0] * (1 - chunk / chunks)))
            cuts.append(min(max(near, cuts[-1] + 1), layers - (chunks - chunk)))
        return tuple(cuts[1:])

    def use_whole_layers(self, cuts: Cuts, plans: Sequence[StagePlan]) -> None:
        """Replace the times of these cuts by those of their stages' choices."""
        for stage, (plan, (first, end)) in enumerate(
            zip(plans, self.problem.ranges(cuts), strict=True)
        ):
            fixed = sum(part.backward for _, part in self.stages.ends(stage))
            excess = price_overflow(self.problem, plan.memory - self.problem.stage_budget(stage))
            self._tables[stage].backward[first, end] = plan.backward[0] - fixed + excess

    @cached_property
    def _tables(self) -> list[RangeTimes]:
        """Times of all ranges of layers, by stage."""
        problem = self.problem
        counts, row, invalid = _count_ranges(problem.layers, len(problem.kinds), problem.all_chunks)
        tables = []
        for stage in range(problem.stages):
            rows = [*self._row_times(stage, counts)]
            forward, backward, update = (column[row] for column in rows)
            tables.append(RangeTimes(forward, np.where(invalid, np.inf, backward), update))
        return tables

    def _row_times(self, stage: int, counts: Integers) -> Iterator[Numbers]:
        """Yield, by row: seconds of a stage's layers in the forward and backward pass, and outside
        the passes, if each of its chunks has a row's layers."""
        problem = self.problem
        in_flight, ends = problem.in_flight(stage), self.stages.ends(stage)
        budget = np.full(len(counts), self.stages.layer_budget(stage))
        update = counts @ np.array([kind.update for kind in problem.kinds]) * problem.chunks
        update = update + sum(end.update for _, end in ends)
        for number, module in enumerate(problem.modules):
            users = [kind.module == number for kind in problem.kinds]
            calls = counts[:, users].sum(axis=1) > 0
            budget, update = budget - module.state * calls, update + module.update * calls
        yield counts @ np.array([kind.forward for kind in problem.kinds]) * problem.chunks
        relaxation = self.stages.relaxation(stage, [sum(in_flight) / problem.chunks])
        yield relaxation.table(counts * problem.chunks, budget)
        yield update

    @cached_property
    def _fastest_passes(self) -> Numbers:
        """[first]: seconds of both passes from a layer to the last one, without recomputation."""
        kinds, ends = self.problem.kinds, (self.problem.first, self.problem.last)
        by_kind = [kind.forward + min(c.backward for c in kind.choices) for kind in kinds]
        times = np.array([by_kind[kind] for kind in self.problem.layers] + [0.0])
        times[[0, -2]] += [end.forward + end.backward for end in ends]
        sums: Numbers = times[::-1].cumsum()[::-1]
        return sums
