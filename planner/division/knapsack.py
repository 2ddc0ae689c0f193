"""Choices for a stage's layers: a short backward time within the memory.

Layers with the same kind are identical, so a stage's choices are counts by kind and choice. State
and activations add up over layers; only the largest workspace counts. For every workspace limit,
linear programming chooses among the choices within it, all whole layers but one. Few layers of each
kind are then chosen again, exactly: all of them where a stage has few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice, pairwise
from typing import NamedTuple

from .frontier import EMPTY, Frontier, join_frontiers, layer_frontier
from .linear import ROUNDING, hull, order_limits, workspace_limits
from .problem import Problem, StagePlan

EXACT_LAYERS = 12
"""Layers of a stage that are chosen exactly, shared evenly by its kinds."""
Ranges = Sequence[tuple[int, int]]
"""First and end layer, by chunk in a stage."""


GAP = 2e-4
"""Part of the backward time by which linear programming in whole layers may miss its bound, before
a few layers are chosen exactly."""


class Tie(Enum):
    """Which of equal backward times wins.

    A stage's time is the sum over its chunks. The last passes of a step are those of the first
    chunks, for which other stages wait; elsewhere the last chunk may be the slowest.
    """

    FIRST = 1e-7
    """Fast passes in the first chunk."""
    LAST = -1e-7
    """Fast passes in the later chunks."""


class Item(NamedTuple):
    """Identical layers, in chunks with equally many micro-batches in flight."""

    kind: int
    in_flight: int
    layers: int
    weight: float
    """Weight of a second, which decides between equal times."""


class LayerSelection(NamedTuple):
    """Choices for the layers of a stage."""

    time: float
    memory: float
    """Bytes, with the workspace."""
    counts: list[list[int]]
    """Number of layers by choice, for every item."""


FrontierCache = dict[tuple[object, ...], Frontier]
"""Frontiers of few identical layers, by choices, workspace, micro-batches in flight, layers."""


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
        self._fastest_first = [
            sorted(range(len(kind.choices)), key=[c.backward for c in kind.choices].__getitem__)
            for kind in problem.kinds
        ]
        self._prefix: list[list[int]] = problem.counts.tolist()
        self._stages: dict[tuple[object, ...], StagePlan | None] = {}
        self._cache = {} if cache is None else cache

    def stage(self, stage: int, ranges: Ranges, tie: Tie | None = Tie.FIRST) -> StagePlan | None:
        """Return a stage's best plan, or (without `tie`) that of linear programming in whole
        layers; None if its layers do not fit into the memory."""
        prefix = self._prefix
        counts = [
            tuple(after - before for before, after in zip(prefix[first], prefix[end], strict=True))
            for first, end in ranges
        ]
        key = (stage, tie, *counts)
        if key not in self._stages:
            self._stages[key] = self._solve_stage(stage, counts, tie)
        return self._stages[key]

    def _solve_stage(
        self, stage: int, counts: Sequence[tuple[int, ...]], tie: Tie | None
    ) -> StagePlan | None:
        problem = self.problem
        chunks, in_flight = problem.stage_chunks(stage), problem.in_flight(stage)
        ends = [list(problem.end_costs(chunk)) for chunk in chunks]
        layers = [
            (problem.kinds[kind], count)
            for by_kind in counts
            for kind, count in enumerate(by_kind)
            if count
        ]
        numbers = {kind.module for kind, _ in layers if kind.module is not None}
        fixed = [end for chunk_ends in ends for end in chunk_ends]
        once = [*fixed, *(problem.modules[number] for number in numbers)]
        update = sum(part.update for part in once) + sum(n * kind.update for kind, n in layers)
        size = sum(part.state for part in once) + sum(
            n * end.activations
            for n, chunk_ends in zip(in_flight, ends, strict=True)
            for end in chunk_ends
        )
        layers_by_item: dict[tuple[int, int], int] = {}
        for n, by_kind in zip(in_flight, counts, strict=True):
            for kind, count in enumerate(by_kind):
                if count:
                    key = n, self.canonical_kinds[kind]
                    layers_by_item[key] = layers_by_item.get(key, 0) + count
        favour = 0.0 if tie is None else tie.value
        items = [
            Item(kind, n, count, 1.0 + favour * (n == in_flight[0]))
            for (n, kind), count in layers_by_item.items()
        ]
        min_workspace = max((end.workspace for end in fixed), default=0.0)
        budget = problem.stage_budget(stage) - size
        selection = self._select(items, budget, min_workspace, exact=tie is not None)
        if selection is None:
            return None
        forward = [sum(end.forward for end in chunk_ends) for chunk_ends in ends]
        backward = [sum(end.backward for end in chunk_ends) for chunk_ends in ends]
        unassigned = {
            (item.in_flight, item.kind): numbers
            for item, numbers in zip(items, selection.counts, strict=True)
        }
        split = [[(0,) * len(kind.choices) for kind in problem.kinds] for _ in chunks]
        for chunk in [*range(len(counts))][:: -1 if tie is Tie.LAST else 1]:
            for kind, count in enumerate(counts[chunk]):
                if count:
                    remaining = unassigned[in_flight[chunk], self.canonical_kinds[kind]]
                    split[chunk][kind] = taken = self._take_fastest(remaining, kind, count)
                    forward[chunk] += count * problem.kinds[kind].forward
                    choices = problem.kinds[kind].choices
                    backward[chunk] += sum(
                        n * choice.backward for n, choice in zip(taken, choices, strict=True) if n
                    )
        return StagePlan(
            tuple(forward),
            tuple(backward),
            update,
            size + selection.memory,
            tuple(map(tuple, split)),
        )

    def _take_fastest(self, numbers: list[int], kind: int, count: int) -> tuple[int, ...]:
        """Take `count` layers of a kind from `numbers` (layers by choice), fastest first."""
        taken = [0] * len(numbers)
        for choice in self._fastest_first[kind]:
            taken[choice] = min(numbers[choice], count)
            numbers[choice] -= taken[choice]
            count -= taken[choice]
        return tuple(taken)

    def _select(
        self, items: Sequence[Item], budget: float, min_workspace: float, *, exact: bool
    ) -> LayerSelection | None:
        """Return the best selection over all workspace limits; None if none fits."""
        groups = [(item.kind, item.layers, item.in_flight) for item in items]
        limits = workspace_limits(self.problem, {item.kind for item in items}, min_workspace)
        best: LayerSelection | None = None
        for bound, workspace in order_limits(self.problem, groups, budget, limits):
            if best is not None and (not exact or bound >= best.time * (1 - ROUNDING)):
                break
            selection: LayerSelection | None
            selection = rounded = self._round_down(items, budget - workspace, workspace)
            if exact and rounded.time > bound * (1 + GAP):
                selection = self._select_exactly(items, rounded, budget - workspace, workspace)
            if selection is not None and (best is None or selection.time < best.time):
                best = selection._replace(memory=selection.memory + workspace)
        return best

    def _select_exactly(
        self, items: Sequence[Item], rounded: LayerSelection, budget: float, workspace: float
    ) -> LayerSelection | None:
        """Keep all layers but a few as they are `rounded`, and choose those exactly."""
        per_item = max(1, EXACT_LAYERS // len(items))
        counts = [[*numbers] for numbers in rounded.counts]
        frontiers = []
        for item, numbers in zip(items, counts, strict=True):
            num_free = min(item.layers, per_item)
            for number in islice(_take_turns([*numbers]), num_free):
                numbers[number] -= 1
            frontiers.append(self._free_frontier(item, num_free, workspace))
        fixed = self._add_up(items, counts)
        joined = EMPTY
        for frontier in frontiers:
            joined = join_frontiers(joined, frontier, budget - fixed.memory)
        if not len(joined.memory):
            return None
        chosen, start = joined.counts[-1].tolist(), 0
        for numbers in counts:
            end = start + len(numbers)
            numbers[:] = [n + m for n, m in zip(numbers, chosen[start:end], strict=True)]
            start = end
        return LayerSelection(
            fixed.time + float(joined.time[-1]), fixed.memory + float(joined.memory[-1]), counts
        )

    def _add_up(self, items: Sequence[Item], counts: list[list[int]]) -> LayerSelection:
        time = memory = 0.0
        for item, numbers in zip(items, counts, strict=True):
            for n, choice in zip(numbers, self.problem.kinds[item.kind].choices, strict=True):
                if n:
                    time += item.weight * n * choice.backward
                    memory += n * (choice.state + item.in_flight * choice.activations)
        return LayerSelection(time, memory, counts)

    def _round_down(self, items: Sequence[Item], budget: float, workspace: float) -> LayerSelection:
        """Choose as linear programming does; the layer that it divides takes its smaller choice."""
        excess = -budget
        steps: list[tuple[float, int, int, int, float]] = []
        counts: list[list[int]] = []
        for number, item in enumerate(items):
            item_hull = hull(self.problem.kinds[item.kind], item.in_flight, workspace)
            assert item_hull is not None, "a bound is finite"
            counts.append([0] * len(self.choices[item.kind]))
            counts[-1][item_hull.choices[0]] = item.layers
            excess += item.layers * item_hull.bytes
            pairs = zip(pairwise(item_hull.choices), item_hull.segments, strict=True)
            steps += [(rate, number, *pair, saved) for pair, (rate, saved) in pairs]
        for _, number, fast, small, saved in sorted(steps):
            if excess <= 0:
                break
            moved = min(counts[number][fast], math.ceil(excess / saved))
            counts[number][fast] -= moved
            counts[number][small] += moved
            excess -= moved * saved
        return self._add_up(items, counts)

    def _free_frontier(self, item: Item, count: int, workspace: float) -> Frontier:
        """Return the exact frontier of `count` layers."""
        choices = self.problem.kinds[item.kind].choices
        key = self.choices[item.kind], workspace, item.in_flight, item.weight, count
        if key not in self._cache:
            layer = layer_frontier(choices, item.in_flight, workspace, item.weight)
            frontier = layer
            for _ in range(count - 1):
                frontier = join_frontiers(frontier, layer, same_kind=True)
            self._cache[key] = frontier
        return self._cache[key]


def _take_turns(numbers: Sequence[int]) -> Iterator[int]:
    """Yield a choice for each of its layers; choices take turns."""
    for turn in range(max(numbers)):
        yield from [number for number, count in enumerate(numbers) if count > turn]
