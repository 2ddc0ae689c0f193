"""Divisions of interleaved schedules, whose stages have several chunks: bounds, and what fits.

No dynamic program divides the layers here: the chunks of a stage share its memory, and are not
neighbours. So divisions are bounded one by one, and the least memory follows from a search of cuts,
chunk by chunk, which leaves out what cannot fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ...trainer.layout.cuts import Cuts, even_cuts
from .linear import LayerGroups, min_seconds, min_seconds_over_limits, workspace_limits
from .problem import Choice, Problem

Counts = tuple[tuple[int, ...], ...]
"""Layers of each kind, by chunk of a stage."""
NODES = 100_000
"""Most beginnings of divisions that a search of the least memory tries: one or two seconds."""


class Stages:
    """Bounds of the stages of a problem by their layers; remembers what it has computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._seconds: dict[tuple[int, Counts], float] = {}
        self._bytes: dict[tuple[int, Counts], float] = {}

    def counts(self, first: int, end: int) -> tuple[int, ...]:
        before, after = self.prefix[first], self.prefix[end]
        return tuple(b - a for a, b in zip(before, after, strict=True))

    @cached_property
    def prefix(self) -> list[list[int]]:
        prefix: list[list[int]] = self.problem.counts.tolist()
        return prefix

    def seconds(self, stage: int, counts: Counts, enough: float = -math.inf) -> float:
        """Return a bound of the backward passes of a stage's layers, infinite if nothing fits; or
        any number that is at least the bound, and at most `enough`."""
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
        """Return the least bytes of a stage with these layers."""
        key = stage, counts
        if key not in self._bytes:
            budget, min_workspace = self._layer_budget(stage, counts)
            groups = self._layer_groups(stage, counts)
            used = self.problem.budget - budget
            self._bytes[key] = used + min(
                workspace
                + sum(n * self._min_bytes(kind, alive, workspace) for kind, n, alive in groups)
                for workspace in self._limits(groups, min_workspace)
            )
        return self._bytes[key]

    def bytes_by_part(self, stage: int, counts: Counts) -> dict[str, float]:
        """Return the least bytes of a stage by part: state, activations, working set."""
        problem, size = self.problem, self.bytes(stage, counts)
        budget, min_workspace = self._layer_budget(stage, counts)
        layers = self._layer_groups(stage, counts)
        for workspace in self._limits(layers, min_workspace):
            chosen = [
                (n, alive, self._smallest(kind, alive, workspace)) for kind, n, alive in layers
            ]
            if any(choice is None for _, _, choice in chosen):
                continue
            activations = sum(n * alive * c.activations for n, alive, c in chosen if c is not None)
            state = sum(n * c.state for n, _, c in chosen if c is not None)
            if math.isclose(problem.budget - budget + state + activations + workspace, size):
                break
        ends = [
            alive * end.activations
            for chunk, alive in zip(problem.stage_chunks(stage), problem.alive(stage), strict=True)
            for end in problem.end_costs(chunk)
        ]
        activations += sum(ends)
        return {
            "state": size - activations - workspace,
            "activations": activations,
            "working": workspace,
        }

    def _limits(self, groups: LayerGroups, lower_limit: float) -> list[float]:
        return workspace_limits(self.problem, {kind for kind, *_ in groups}, lower_limit)

    def _smallest(self, kind: int, alive: int, workspace: float) -> Choice | None:
        """Return the choice of least bytes with work within a limit; None without one."""
        choices = [c for c in self.problem.kinds[kind].choices if c.workspace <= workspace]
        return min(choices, key=lambda c: c.state + alive * c.activations, default=None)

    def _min_bytes(self, kind: int, alive: int, workspace: float) -> float:
        choice = self._smallest(kind, alive, workspace)
        return math.inf if choice is None else choice.state + alive * choice.activations

    def _layer_groups(self, stage: int, counts: Counts) -> list[tuple[int, int, int]]:
        alive = self.problem.alive(stage)
        return [
            (kind, count, n)
            for n, by_kind in zip(alive, counts, strict=True)
            for kind, count in enumerate(by_kind)
            if count
        ]

    def _layer_budget(self, stage: int, counts: Counts) -> tuple[float, float]:
        """Return the bytes for layers and work, and the least work."""
        problem = self.problem
        budget, min_workspace = problem.stage_budget(stage), 0.0
        for chunk, alive in zip(problem.stage_chunks(stage), problem.alive(stage), strict=True):
            for end in problem.end_costs(chunk):
                budget -= end.state + alive * end.activations
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
    """Bound of one division: the passes of each stage within its memory, and those of the chunks
    before its first one, without recompute. Infinite if a stage does not fit."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stages = Stages(problem)
        times = _min_layer_times(problem)
        times[0] += problem.first.forward + problem.first.backward
        times[-1] += problem.last.forward + problem.last.backward
        self.sums = list(accumulate(times, initial=0.0))
        self._known: dict[Cuts, float] = {}

    def __call__(self, cuts: Cuts, ceiling: float = math.inf) -> float:
        """Return the bound, or a lower one that reaches the ceiling."""
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
        problem, m = self.problem, self.problem.micro_batches
        ranges = problem.ranges(cuts)
        bound = before = 0.0
        for stage in range(problem.stages):
            chunk_ranges = [ranges[chunk] for chunk in problem.stage_chunks(stage)]
            counts = tuple(self.stages.counts(*each) for each in chunk_ranges)
            seconds = 0.0
            for by_kind in counts:
                seconds += sum(
                    n * kind.forward for n, kind in zip(by_kind, problem.kinds, strict=True)
                )
            for chunk in problem.stage_chunks(stage):
                seconds += sum(
                    end_part.forward + end_part.backward for end_part in problem.end_costs(chunk)
                )
            hidden = (bound - before) / m - seconds  # such a stage is not the slowest
            seconds += self.stages.seconds(stage, counts, hidden)
            bound = max(bound, before + m * seconds)
            if bound >= ceiling:
                return bound
            first, end = ranges[stage]
            before += self.sums[end] - self.sums[first] + 2 * problem.message
        return bound


def interleaved_estimate(problem: Problem, ceiling: float) -> float:
    """Return the bound of the divisions that the search begins with; infinite if none fits, any
    number from the ceiling on if none is below it."""
    bound = DivisionBound(problem)
    min_bound = math.inf
    for cuts in initial_cuts(problem):
        min_bound = min(min_bound, bound(cuts, min(min_bound, ceiling)))
    return min_bound


def initial_cuts(problem: Problem) -> set[Cuts]:
    """Return divisions into equal numbers of layers, equal times and equal memory."""
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
    """Return cuts where the sum of the costs passes equal parts of the total."""
    sums = list(accumulate(costs, initial=0.0))
    cuts: list[int] = []
    for chunk in range(1, chunks):
        near = bisect_left(sums, sums[-1] * chunk / chunks)
        first_allowed = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(near, first_allowed), len(costs) - (chunks - chunk)))
    return tuple(cuts)


@dataclass(frozen=True)
class MinMemoryDivision:
    """The division whose fullest stage needs the least bytes."""

    bytes: float
    cuts: Cuts | None
    """None if no division below the ceiling was found."""
    complete: bool
    """True if no other division needs less, or it needs little enough."""
    nodes: int = 0
    """Beginnings that were tried."""


def find_min_memory_division(
    problem: Problem, ceiling: float = math.inf, enough: float = 0.0, max_nodes: int = NODES
) -> MinMemoryDivision:
    """Return the division of least memory below `ceiling`; the first one of at most `enough`.

    Cuts are tried chunk by chunk. A beginning is left out if a stage already has too much, or if
    the mean of all stages has too much with the layers that are left.
    """
    stages, layers, chunks = Stages(problem), len(problem.layers), problem.all_chunks
    none = (0,) * len(problem.kinds)
    after = _sizes_after(problem)
    best, nodes = ceiling, 0
    cuts: Cuts | None = None
    no_layers = tuple((none,) * problem.chunks for _ in range(problem.stages))
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
        following.sort(key=lambda each: -each[0])  # the last one is taken first
        todo += [node for _, node in following]
    return MinMemoryDivision(best, cuts, best <= enough or not todo, nodes)


def _sizes_after(problem: Problem) -> list[list[float]]:
    """Return [chunk][layer]: the least bytes of the layers from this one on, in chunks from this
    one on."""
    alive = [
        problem.alive(chunk % problem.stages)[chunk // problem.stages]
        for chunk in range(problem.all_chunks)
    ]
    sizes_after = []
    for chunk in range(problem.all_chunks):
        min_alive_after = min(alive[chunk:])
        sizes = [
            min(c.state + min_alive_after * c.activations for c in kind.choices)
            for kind in problem.kinds
        ]
        back = accumulate((sizes[kind] for kind in reversed(problem.layers)), initial=0.0)
        sizes_after.append(list(back)[::-1])
    return [*sizes_after, [0.0] * (len(problem.layers) + 1)]
