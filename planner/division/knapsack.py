"""Exact choices for a stage's layers: the shortest backward time within the memory.

Layers with the same kind are identical, so a stage's choices are counts by kind and choice. State
and activations add up over layers; only the largest workspace counts. For every workspace limit,
the choices within it add up, and the Pareto frontier in memory and time for several layers follows
from frontiers for fewer.

Large frontiers are subsampled first, which can overestimate the time. If the bound by linear
programming allows a better solution, solve exactly on the points that reduced costs do not exclude:
a byte is worth `rate` seconds, and a selection that wastes more than the gap between the bound and
the known time is in no better solution.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from .frontier import (
    EMPTY,
    Frontier,
    FrontierCache,
    Prune,
    join_frontiers,
    layer_frontier,
    prune_frontiers,
    thin_frontier,
)
from .linear import ROUNDING, LayerGroups, marginal_rate, min_seconds, workspace_limits
from .problem import Problem, StagePlan

Ranges = Sequence[tuple[int, int]]
"""First and end layer, by chunk in a stage."""
Items = Sequence[tuple[int, int, int, int]]
"""Chunk, kind, micro-batches in flight, and number of layers."""


class Knapsack:
    """Best choices for a problem's stages, with a cache."""

    def __init__(self, problem: Problem, cache: FrontierCache | None = None) -> None:
        """`cache` has frontiers from problems that may have the same choices."""
        self.problem = problem
        self.choices = [
            tuple((c.backward, c.state, c.activations, c.workspace) for c in kind.choices)
            for kind in problem.kinds
        ]
        """Choices without names, by kind."""
        self.canonical_kinds = [self.choices.index(choices) for choices in self.choices]
        """First kind with the same choices, by kind: calls to different shared blocks are equal."""
        self._stages: dict[tuple[object, ...], StagePlan | None] = {}
        self._cache = {} if cache is None else cache
        self._prune: Prune | None = None
        self._thin = False
        """True if the last selection used a thinned frontier."""

    def stage(self, stage: int, ranges: Ranges) -> StagePlan | None:
        """Return a stage's best plan; None if its layers do not fit into the memory."""
        counts = [self._counts(first, end) for first, end in ranges]
        key = (stage, *counts)
        if key not in self._stages:
            self._stages[key] = self._solve_stage(stage, counts)
        return self._stages[key]

    def _counts(self, first: int, end: int) -> tuple[int, ...]:
        prefix = self.problem.counts
        return tuple(int(n) for n in prefix[end] - prefix[first])

    def _solve_stage(self, stage: int, counts: Sequence[tuple[int, ...]]) -> StagePlan | None:
        problem = self.problem
        chunks, in_flight = problem.stage_chunks(stage), problem.in_flight(stage)
        fixed = [list(problem.end_costs(chunk)) for chunk in chunks]
        modules = {
            kind.module
            for by_kind in counts
            for kind, count in zip(problem.kinds, by_kind, strict=True)
            if count and kind.module is not None
        }
        state = sum(end.state for ends in fixed for end in ends)
        state += sum(problem.modules[number].state for number in modules)
        activations = sum(
            n * end.activations for n, ends in zip(in_flight, fixed, strict=True) for end in ends
        )
        update = sum(end.update for ends in fixed for end in ends)
        update += sum(problem.modules[number].update for number in modules)
        update += sum(
            count * kind.update
            for by_kind in counts
            for kind, count in zip(problem.kinds, by_kind, strict=True)
        )
        min_workspace = max((end.workspace for ends in fixed for end in ends), default=0.0)
        counts_by_choices: dict[tuple[int, int], int] = {}
        for chunk, by_kind in enumerate(counts):
            for kind, count in enumerate(by_kind):
                if count:
                    key = chunk, self.canonical_kinds[kind]
                    counts_by_choices[key] = counts_by_choices.get(key, 0) + count
        items = [
            (chunk, kind, in_flight[chunk], n) for (chunk, kind), n in counts_by_choices.items()
        ]
        items.sort(key=lambda item: item[-1])  # the longest frontier is not joined, but searched
        budget = problem.stage_budget(stage) - state - activations
        best = self._fastest(items, budget, min_workspace)
        limits = [] if best is not None else self._limits(items, budget, min_workspace)
        for bound, workspace in limits:
            if math.isinf(bound) or (best is not None and bound >= best[0]):
                break
            selection = self._solve_within(items, budget - workspace, workspace, bound)
            if selection is not None and (best is None or selection[0] < best[0]):
                best = (selection[0], selection[1] + workspace, selection[2])
        if best is None:
            return None
        _, memory, chosen = best
        split: list[list[tuple[int, ...]]] = [
            [(0,) * len(kind.choices) for kind in problem.kinds] for _ in chunks
        ]
        forward = [sum(end.forward for end in ends) for ends in fixed]
        backward = [sum(end.backward for end in ends) for ends in fixed]
        unassigned: dict[tuple[int, int], list[int]] = {}
        start = 0
        for chunk, kind, *_ in items:
            end_choice = start + len(problem.kinds[kind].choices)
            unassigned[chunk, kind] = chosen[start:end_choice]
            start = end_choice
        for chunk, by_kind in enumerate(counts):
            for kind, count in enumerate(by_kind):
                if not count:
                    continue
                unassigned_counts = unassigned[chunk, self.canonical_kinds[kind]]
                split[chunk][kind] = numbers = _take_layers(unassigned_counts, count)
                forward[chunk] += count * problem.kinds[kind].forward
                choices = problem.kinds[kind].choices
                backward[chunk] += sum(
                    n * choice.backward for n, choice in zip(numbers, choices, strict=True)
                )
        return StagePlan(
            tuple(forward),
            tuple(backward),
            update,
            state + activations + memory,
            tuple(map(tuple, split)),
        )

    def _limits(
        self, items: Items, budget: float, min_workspace: float
    ) -> list[tuple[float, float]]:
        """Return lower bounds on the time with their workspace limits, in rising order."""
        groups = group_layers(items)
        limits = workspace_limits(self.problem, {kind for kind, *_ in groups}, min_workspace)
        return sorted(
            (min_seconds(self.problem, groups, budget - workspace, workspace), workspace)
            for workspace in limits
        )

    def _fastest(
        self, items: Items, budget: float, min_workspace: float
    ) -> tuple[float, float, list[int]] | None:
        """Return time, memory and counts for the fastest choice in every layer; None if these do
        not fit together."""
        time = memory = 0.0
        workspace = min_workspace
        chosen: list[int] = []
        for _, kind, in_flight, count in items:
            choices = self.problem.kinds[kind].choices
            numbers = range(len(choices))
            sizes = [choice.state + in_flight * choice.activations for choice in choices]
            number = min(numbers, key=lambda n, c=choices, s=sizes: (c[n].backward, s[n]))  # type: ignore[misc]
            time += count * choices[number].backward
            memory += count * sizes[number]
            workspace = max(workspace, choices[number].workspace)
            chosen += [count * (n == number) for n in numbers]
        if memory + workspace > budget:
            return None
        return time, memory + workspace, chosen

    def _solve_within(
        self, items: Items, budget: float, workspace: float, bound: float
    ) -> tuple[float, float, list[int]] | None:
        """Return `_select`'s result, solved exactly if `bound`, by linear programming, is lower."""
        self._thin = False
        quick = self._select(items, budget, workspace)
        if quick is None or not self._thin or quick[0] <= bound * (1 + ROUNDING):
            return quick
        groups = group_layers(items)
        rate = marginal_rate(self.problem, groups, budget, workspace)
        base_costs = {
            (kind, in_flight): min(
                choice.backward + rate * (choice.state + in_flight * choice.activations)
                for choice in self.problem.kinds[kind].choices
                if choice.workspace <= workspace
            )
            for _, kind, in_flight, _ in items
        }
        lower_bound = (
            sum(count * base_costs[kind, in_flight] for _, kind, in_flight, count in items)
            - rate * budget
        )
        gap = quick[0] - lower_bound + ROUNDING * quick[0]
        self._prune = Prune(rate, base_costs, gap)
        try:
            exact = self._select(items, budget, workspace)
        finally:
            self._prune = None
        return quick if exact is None or quick[0] <= exact[0] else exact

    def _select(
        self, items: Items, budget: float, workspace: float
    ) -> tuple[float, float, list[int]] | None:
        """Return the minimum time within the budget, the memory, and counts by item and choice."""
        frontiers: list[Frontier] = []
        for _, kind, in_flight, count in items:
            frontier = self._kind_frontier(kind, in_flight, count, workspace)
            if frontier is None:
                return None
            frontiers.append(frontier)
        if len(items) > 1:
            rate = marginal_rate(self.problem, group_layers(items), budget, workspace)
            frontiers = prune_frontiers(frontiers, budget, rate * (1 + ROUNDING))
        joined, last = EMPTY, frontiers[-1]
        for frontier in frontiers[:-1]:
            joined = join_frontiers(joined, frontier, budget)
        # Pair every joined selection with the last kind's fastest one that still fits.
        partners = np.searchsorted(last.memory, budget - joined.memory, side="right") - 1
        [fits] = np.nonzero(partners >= 0)
        if not len(fits):
            return None
        times = joined.time[fits] + last.time[partners[fits]]
        index = fits[times.argmin()]
        last_index = partners[index]
        counts = joined.counts(index) + last.counts(last_index)
        return float(times.min()), float(joined.memory[index] + last.memory[last_index]), counts

    def _kind_frontier(
        self, kind: int, in_flight: int, count: int, workspace: float
    ) -> Frontier | None:
        """Return the frontier for `count` layers; None if no choice fits `workspace`."""
        # Workspaces between two choices' allow the same choices.
        num_allowed = bisect_right(self.problem.kinds[kind].workspaces, workspace)
        key = self.choices[kind], num_allowed, in_flight, count
        cache = self._cache if self._prune is None else self._prune.cache
        if key not in cache:
            cache[key] = self._multiply(kind, in_flight, count, workspace)
        frontier = cache[key]
        self._thin |= frontier is not None and not frontier.complete
        return frontier

    def _multiply(self, kind: int, in_flight: int, count: int, workspace: float) -> Frontier | None:
        if count == 1:
            return layer_frontier(self.problem.kinds[kind].choices, in_flight, workspace)
        half = self._kind_frontier(kind, in_flight, count // 2, workspace)
        remainder = self._kind_frontier(kind, in_flight, count - count // 2, workspace)
        if half is None or remainder is None:
            return None
        if self._prune is None:
            return thin_frontier(join_frontiers(half, remainder, np.inf, same_kind=True))
        return self._prune.join_frontiers(half, remainder, kind, in_flight)


def group_layers(items: Items) -> LayerGroups:
    return [(kind, count, in_flight) for _, kind, in_flight, count in items]


def _take_layers(numbers: list[int], count: int) -> tuple[int, ...]:
    """Take `count` layers from `numbers` (layers by choice), first choices first."""
    taken_counts = []
    for choice, n in enumerate(numbers):
        taken = min(n, count)
        numbers[choice] -= taken
        count -= taken
        taken_counts.append(taken)
    return tuple(taken_counts)
