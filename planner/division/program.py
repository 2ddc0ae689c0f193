"""Cut the layers into chunks by a dynamic program.

The slowest stage of its cuts is the fastest, by the times of linear programming (choices.py). The
program sees a stage as if all its chunks were alike, which is exact for one chunk per stage: its
result is then a lower bound on the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...trainer.layout.cuts import Cuts
from .choices import Relaxation
from .problem import Integers, Numbers, Problem

TIE = 1e-6
"""Part of the step by which times are equal."""

BISECTIONS = 12
"""Limits that are tried when chunks are filled."""

Relax = Callable[[Sequence[float]], Relaxation]
"""Returns the linear programs for micro-batches in flight."""


class Start(NamedTuple):
    """Where the search for a division begins."""

    estimate: float
    """Seconds of the step; a lower bound if stages have one chunk."""
    cuts: Cuts


@lru_cache(maxsize=64)
def _count_ranges(
    layers: tuple[int, ...], num_kinds: int, chunks: int
) -> tuple[Integers, Integers, Numbers]:
    """Count the layers by kind in all ranges [first, end) that may be a chunk.

    Return the distinct counts [rows, kinds]; the row of every range [first, end]; and 0, or
    infinity for ranges that are no chunk. Many ranges share a row: times are computed by row.
    """
    one_hot = np.eye(num_kinds, dtype=np.int64)[list(layers)]
    prefix = np.concatenate([np.zeros((1, num_kinds), dtype=np.int64), one_hot.cumsum(axis=0)])
    ends = np.arange(len(prefix))
    lengths = ends - ends[:, None]
    num_neighbours = (ends[:, None] > 0).astype(np.int64) + (ends < len(layers))
    invalid = (lengths <= 0) | (lengths > len(layers) - chunks + 1) | (num_neighbours >= chunks)
    between = np.where(invalid[:, :, None], 0, prefix[None, :, :] - prefix[:, None, :])
    counts, row = np.unique(between.reshape(-1, num_kinds), axis=0, return_inverse=True)
    return counts, row.reshape(invalid.shape), np.where(invalid, np.inf, 0.0)


def _time_ranges(problem: Problem, relax: Relax, stage: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return, for every range [first, end), seconds of a stage in the forward and backward pass,
    and outside the passes, if each of its chunks has the range's layers. Backward seconds of ranges
    that are no chunk are infinite."""
    counts, row, invalid = _count_ranges(problem.layers, len(problem.kinds), problem.all_chunks)
    ends = np.array([[stage == 0, stage == problem.stages - 1]]).repeat(len(counts), axis=0)
    counts = np.hstack([counts * problem.chunks, ends])
    forward, update = (
        counts @ np.array([(k.forward, k.update) for k in problem.all_kinds]).T[..., None]
    )
    budget = np.full(len(counts), problem.stage_budget(stage))
    for number, module in enumerate(problem.modules):
        calls = counts[:, [kind.module == number for kind in problem.all_kinds]].any(axis=1)
        budget, update = budget - module.state * calls, update + module.update * calls[:, None]
    mean_in_flight = sum(problem.in_flight(stage)) / problem.chunks
    backward = relax([mean_in_flight]).table(counts, budget)
    return forward[row, 0], backward[row] + invalid, update[row, 0]


def find_cuts(problem: Problem, relax: Relax) -> Start:
    """Return the cuts with the shortest step."""
    p, m, chunks, layers = (
        problem.stages, problem.micro_batches, problem.all_chunks, len(problem.layers),
    )  # fmt: skip
    tables = [_time_ranges(problem, relax, stage) for stage in range(p)]
    fastest = sum_fastest(problem)
    remaining, trips = np.full(layers + 1, np.inf), np.full(layers + 1, np.inf)
    """By the first layer of the chunks that remain: bound on the seconds from the first pass of a
    stage to the end of the step, and seconds of a micro-batch to the last chunk and back."""
    remaining[layers] = trips[layers] = 0.0
    ends: list[Integers] = []
    for chunk in reversed(range(chunks)):
        forward, backward, update = tables[chunk % p]
        passes = forward + backward
        hop = 2 * problem.message if chunk < chunks - 1 else 0.0
        trip = passes + hop + trips
        if problem.chunks > 1:
            step = np.maximum(m * passes, remaining)
        else:
            fits = np.isfinite(trip)
            alone = problem.schedule.bound(
                m,
                p - chunk,
                *(np.where(fits, seconds, 0.0) for seconds in (passes, backward, trip)),
            )
            step = np.maximum(np.where(fits, alone, np.inf), passes + hop + remaining)
        if chunk == 0:
            step = step + update
        # Of equal steps, the chunk that is nearest to the mean of those that remain is best.
        uneven = np.abs(passes - problem.chunks * fastest[:, None] / (chunks - chunk))
        ends.append((step + TIE * m * uneven).argmin(axis=1))
        remaining, trips = step.min(axis=1), trip.min(axis=1)
    cuts = [0]
    for end in reversed(ends):
        cuts.append(int(end[cuts[-1]]))
    return Start(float(remaining[0]), tuple(cuts[1:-1]))


def balance_seconds(problem: Problem) -> Cuts:
    """Return cuts into chunks of nearly equal seconds with the fastest choices."""
    seconds, chunks = sum_fastest(problem), problem.all_chunks
    layers, cuts = len(problem.layers), [0]
    for chunk in range(1, chunks):
        near = int(np.searchsorted(-seconds, -seconds[0] * (1 - chunk / chunks)))
        cuts.append(min(max(near, cuts[-1] + 1), layers - (chunks - chunk)))
    return tuple(cuts[1:])


def balance_bytes(problem: Problem) -> Cuts:
    """Return cuts into stages of nearly equal bytes with the smallest choices: each chunk fills its
    stage up to its turn's part of a limit, which is the smallest that leaves no layer over."""
    sums = []
    for chunk in range(problem.all_chunks):
        turn, stage = divmod(chunk, problem.stages)
        in_flight = problem.in_flight(stage)[turn]
        sizes = [min(c.bytes(in_flight) for c in kind.choices) for kind in problem.all_kinds]
        sums.append(problem.counts @ np.array(sizes))
    last, layers = len(sums) - 1, len(problem.layers)
    low, high = 0.0, float(max(row[-1] for row in sums))
    for _ in range(BISECTIONS):
        limit = (low + high) / 2
        loads, cuts = [0.0] * problem.stages, [0]
        for chunk, row in enumerate(sums):
            turn, stage = divmod(chunk, problem.stages)
            room = limit * (turn + 1) / problem.chunks - loads[stage]
            end = int(np.searchsorted(row, row[cuts[-1]] + room, side="right")) - 1
            cuts.append(min(max(end, cuts[-1] + 1), layers - (last - chunk)))
            loads[stage] += row[cuts[-1]] - row[cuts[-2]]
        low, high = (low, limit) if cuts[-1] == layers else (limit, high)
    return tuple(cuts[1:-1])


def sum_fastest(problem: Problem) -> Numbers:
    """Return the seconds of both passes from each layer to the last one, without recomputation."""
    seconds: Numbers = (problem.counts[-1] - problem.counts) @ np.array(
        [kind.fastest for kind in problem.all_kinds]
    )
    return seconds
