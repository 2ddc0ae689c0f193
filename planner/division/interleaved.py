"""Bounds and minimum memory for interleaved schedules, whose stages have several chunks.

No dynamic program divides the layers: a stage's chunks share its memory, and are not neighbours. So
divisions are bounded one by one. A search over cuts, chunk by chunk, finds the minimum memory; it
prunes what cannot fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...trainer.layout.cuts import Cuts, even_cuts
from .linear import LayerGroups, min_seconds, min_seconds_over_limits, workspace_limits
from .problem import Problem

Counts = tuple[tuple[int, ...], ...]
"""Number of layers by chunk of a stage, and kind."""
NODES = 100_000
"""Maximum number of partial divisions that a search for minimum memory tries: a second or two."""


class Stages:
    """Lower bounds on time and memory of a stage by its layers, with a cache."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._prefix: list[list[int]] = problem.counts.tolist()
        self._ends = [
            [
                (in_flight, end)
                for chunk, in_flight in zip(
                    problem.stage_chunks(stage), problem.in_flight(stage), strict=True
                )
                for end in problem.end_costs(chunk)
            ]
            for stage in range(problem.stages)
        ]
        """Fixed costs of every stage, with their micro-batches in flight."""
        self._counts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._fixed: dict[tuple[int, Counts], float] = {}
        self._seconds: dict[tuple[int, Counts], float] = {}
        self._bytes: dict[tuple[int, Counts], float] = {}

    def counts(self, first: int, end: int) -> tuple[int, ...]:
        """Return the number of layers by kind in a range."""
        key = first, end
        if key not in self._counts:
            before, after = self._prefix[first], self._prefix[end]
            self._counts[key] = tuple(b - a for a, b in zip(before, after, strict=True))
        return self._counts[key]

    def fixed_seconds(self, stage: int, counts: Counts) -> float:
        """Return the seconds of a stage's passes that no choice changes."""
        key = stage, counts
        if key not in self._fixed:
            kinds, ends = self.problem.kinds, self._ends[stage]
            self._fixed[key] = sum(
                n * kind.forward
                for by_kind in counts
                for n, kind in zip(by_kind, kinds, strict=True)
            ) + sum(end.forward + end.backward for _, end in ends)
        return self._fixed[key]

    def seconds(self, stage: int, counts: Counts, enough: float = -math.inf) -> float:
        """Return a lower bound on a stage's backward seconds, infinite if nothing fits.

        If the bound is at most `enough`, an overestimate up to `enough` may be returned.
        """
        key = stage, counts
        if key not in self._seconds:
            budget, min_workspace = self._layer_budget(stage, counts)
            groups = self._layer_groups(stage, counts)
            limits = self._limits(groups, min_workspace)
            quick = min_seconds(self.problem, groups, budget - limits[-1], limits[-1])
            if quick <= enough:
                return quick
            self._seconds[key] = min_seconds_over_limits(self.problem, groups, budget, limits)
        return self._seconds[key]

    def bytes(self, stage: int, counts: Counts) -> float:
        """Return a stage's minimum bytes with these layers."""
        key = stage, counts
        if key not in self._bytes:
            budget, min_workspace = self._layer_budget(stage, counts)
            groups = self._layer_groups(stage, counts)
            used = self.problem.budget - budget
            self._bytes[key] = used + min(
                workspace
                + sum(
                    n * self._min_bytes(kind, in_flight, workspace) for kind, n, in_flight in groups
                )
                for workspace in self._limits(groups, min_workspace)
            )
        return self._bytes[key]

    def _limits(self, groups: LayerGroups, lower_limit: float) -> list[float]:
        return workspace_limits(self.problem, {kind for kind, *_ in groups}, lower_limit)

    def _min_bytes(self, kind: int, in_flight: int, workspace: float) -> float:
        """Return the bytes of the smallest choice within a workspace limit."""
        choices = self.problem.kinds[kind].choices
        sizes = (c.state + in_flight * c.activations for c in choices if c.workspace <= workspace)
        return min(sizes, default=math.inf)

    def _layer_groups(self, stage: int, counts: Counts) -> list[tuple[int, int, int]]:
        """Return the layers by kind and micro-batches in flight."""
        groups: dict[tuple[int, int], int] = {}
        for n, by_kind in zip(self.problem.in_flight(stage), counts, strict=True):
            for kind, count in enumerate(by_kind):
                if count:
                    groups[kind, n] = groups.get((kind, n), 0) + count
        return [(kind, count, n) for (kind, n), count in groups.items()]

    def _layer_budget(self, stage: int, counts: Counts) -> tuple[float, float]:
        """Return the bytes left for layers and workspace, and the minimum workspace."""
        problem = self.problem
        budget, min_workspace = problem.stage_budget(stage), 0.0
        for in_flight, end in self._ends[stage]:
            budget -= end.state + in_flight * end.activations
            min_workspace = max(min_workspace, end.workspace)
        called_modules = {
            problem.kinds[kind].module
            for by_kind in counts
            for kind, count in enumerate(by_kind)
            if count
        }
        budget -= sum(
            module.state for n, module in enumerate(problem.modules) if n in called_modules
        )
        return budget, min_workspace


class DivisionBound:
    """Lower bound on a division's step; infinite if a stage does not fit.

    Every stage counts its passes within its memory, and the chunks before its first one without
    recompute.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stages = Stages(problem)
        times = _min_layer_times(problem)
        times[0] += problem.first.forward + problem.first.backward
        times[-1] += problem.last.forward + problem.last.backward
        self.sums = list(accumulate(times, initial=0.0))
        self._known: dict[Cuts, float] = {}

    def __call__(self, cuts: Cuts, ceiling: float = math.inf) -> float:
        """Return the bound, or a weaker one that reaches the ceiling."""
        if cuts not in self._known:
            quick = self._bound_without_memory(cuts)
            if quick >= ceiling:
                return quick
            bound = self._bound(cuts, ceiling)
            if ceiling <= bound < math.inf:
                return bound
            self._known[cuts] = bound
        return self._known[cuts]

    def _bound_without_memory(self, cuts: Cuts) -> float:
        """Return the bound without the memory."""
        problem, ranges = self.problem, self.problem.ranges(cuts)
        chunks = [self.sums[end] - self.sums[first] for first, end in ranges]
        bound = before = 0.0
        for stage in range(problem.stages):
            seconds = sum(chunks[chunk] for chunk in problem.stage_chunks(stage))
            bound = max(bound, before + problem.micro_batches * seconds)
            before += chunks[stage] + 2 * problem.message
        return bound

    def _bound(self, cuts: Cuts, ceiling: float) -> float:
        stages, m, p = self.stages, self.problem.micro_batches, self.problem.stages
        ranges = self.problem.ranges(cuts)
        bound = before = 0.0
        for stage in range(p):
            counts = tuple(stages.counts(first, end) for first, end in ranges[stage::p])
            seconds = stages.fixed_seconds(stage, counts)
            hidden = (bound - before) / m - seconds  # such a stage is not the slowest
            seconds += stages.seconds(stage, counts, hidden)
            bound = max(bound, before + m * seconds)
            if bound >= ceiling:
                return bound
            first, end = ranges[stage]
            before += self.sums[end] - self.sums[first] + 2 * self.problem.message
        return bound


def interleaved_estimate(problem: Problem, ceiling: float) -> float:
    """Return the lowest bound among `initial_cuts`; infinite if none fits. Above the ceiling it is
    not exact."""
    bound = DivisionBound(problem)
    min_bound = math.inf
    for cuts in initial_cuts(problem):
        min_bound = min(min_bound, bound(cuts, min(min_bound, ceiling)))
    return min_bound


def initial_cuts(problem: Problem) -> set[Cuts]:
    """Return divisions into chunks with equal numbers of layers, equal times and equal memory."""
    chunks, layers = problem.all_chunks, len(problem.layers)
    min_sizes = [
        min(c.state + problem.stages * c.activations for c in kind.choices)
        for kind in problem.kinds
    ]
    sizes, times = [min_sizes[kind] for kind in problem.layers], _min_layer_times(problem)
    times[-1] += problem.last.forward + problem.last.backward
    return {even_cuts(layers, chunks), balance_cuts(times, chunks), balance_cuts(sizes, chunks)}


def _min_layer_times(problem: Problem) -> list[float]:
    min_times = [kind.forward + min(c.backward for c in kind.choices) for kind in problem.kinds]
    return [min_times[kind] for kind in problem.layers]


def balance_cuts(costs: Sequence[float], chunks: int) -> Cuts:
    """Return cuts into chunks with nearly equal sums of costs."""
    sums = list(accumulate(costs, initial=0.0))
    cuts: list[int] = []
    for chunk in range(1, chunks):
        near = bisect_left(sums, sums[-1] * chunk / chunks)
        first_allowed = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(near, first_allowed), len(costs) - (chunks - chunk)))
    return tuple(cuts)


@dataclass(frozen=True)
class MinMemoryDivision:
    """The division with the smallest fullest stage."""

    bytes: float
    cuts: Cuts | None
    """None if no division below the ceiling was found."""
    complete: bool
    """True if no division needs less, or this one needs little enough."""
    nodes: int = 0
    """Number of partial divisions tried."""


def find_min_memory_division(
    problem: Problem, ceiling: float = math.inf, enough: float = 0.0, max_nodes: int = NODES
) -> MinMemoryDivision:
    """Return the division with minimum memory below `ceiling`, or the first with at most `enough`.

    Cuts are tried chunk by chunk. A partial division is pruned if a stage already exceeds the best,
    or if the mean over stages does with the remaining layers.
    """
    stages, layers, chunks = Stages(problem), len(problem.layers), problem.all_chunks
    no_counts = (0,) * len(problem.kinds)
    after = _sizes_after(problem)
    best, nodes = ceiling, 0
    cuts: Cuts | None = None
    no_layers = tuple((no_counts,) * problem.chunks for _ in range(problem.stages))
    begin = tuple(stages.bytes(stage, counts) for stage, counts in enumerate(no_layers))
    todo: list[tuple[Cuts, tuple[float, ...], tuple[Counts, ...]]] = [((), begin, no_layers)]
    while todo and nodes < max_nodes:
        done, sizes, counts = todo.pop()
        nodes += 1
        chunk, first = len(done), done[-1] if done else 0
        if max(*sizes, (sum(sizes) + after[chunk][first]) / problem.stages) >= best:
            continue
        if chunk == chunks:
            best, cuts = max(sizes), done[:-1]
            if best <= enough:
                break
            continue
        stage = chunk % problem.stages
        chunks_after = chunks - chunk - 1
        following = []
        for end in range(first + 1, layers - chunks_after + 1) if chunks_after else [layers]:
            stage_counts = list(counts[stage])
            stage_counts[chunk // problem.stages] = stages.counts(first, end)
            size = stages.bytes(stage, tuple(stage_counts))
            if size >= best:  # more layers need more
                break
            share = after[chunk][first] / (chunks_after + 1)
            imbalance = abs(after[chunk][first] - after[chunk][end] - share)
            stages_after = (
                (*sizes[:stage], size, *sizes[stage + 1 :]),
                (*counts[:stage], tuple(stage_counts), *counts[stage + 1 :]),
            )
            following.append((imbalance, ((*done, end), *stages_after)))
        following.sort(key=lambda node: -node[0])  # the stack pops the last node first
        todo += [node for _, node in following]
    return MinMemoryDivision(best, cuts, best <= enough or not todo, nodes)


def _sizes_after(problem: Problem) -> list[list[float]]:
    """Return [chunk][layer]: minimum bytes of all layers from a layer on, placed in chunks from a
    chunk on."""
    in_flight = [
        problem.in_flight(chunk % problem.stages)[chunk // problem.stages]
        for chunk in range(problem.all_chunks)
    ]
    sizes_after = []
    for chunk in range(problem.all_chunks):
        min_in_flight_after = min(in_flight[chunk:])
        sizes = [
            min(c.state + min_in_flight_after * c.activations for c in kind.choices)
            for kind in problem.kinds
        ]
        back = accumulate((sizes[kind] for kind in reversed(problem.layers)), initial=0.0)
        sizes_after.append(list(back)[::-1])
    return [*sizes_after, [0.0] * (len(problem.layers) + 1)]
