"""Choices for a stage's layers: a short backward time within the memory.

Layers of a kind are identical, so a stage's choices are numbers of layers by kind and choice. State
and activations add up over layers, while only the largest workspace counts: every workspace limit
allows its own choices, and leaves its own budget for the sum. Within a limit, the layers take the
choices that save most memory per second until they fit. That is linear programming: all layers are
whole but one, which takes the smaller choice. If that misses the bound by more than GAP, a few
layers are chosen again, exactly: all of them where a stage has few.

Bytes beyond the budget cost seconds, so many that choices take them only where none fit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from .problem import Choice, Hull, Integers, LayerKind, Numbers, Problem

GAP = 2e-3
"""Part of the backward time by which whole layers may miss the bound of linear programming."""
EXACT_LAYERS = 12
"""Layers of a stage that are chosen exactly, shared evenly by its kinds."""
MAX_LIMITS = 12
"""Workspace limits that tables try one by one. More are tried in groups, by the choices of the
largest limit within the budget of the smallest: times are then lower bounds."""
ROUNDING = 1e-9
"""Fraction of the budget by which rounded sums may exceed it."""
PENALTY = 1e15
"""Seconds for the whole budget in excess: more than any step for a thousandth of a byte."""
EXCESSIVE = 1e6
"""Seconds of a bound from which bytes exceed the budget."""
UNUSABLE = 1e30
"""Seconds of a kind without a choice within a limit: more than any penalty."""

Columns = Sequence[tuple[int, float]]
"""Kinds of layers, with their micro-batches in flight."""


def price_overflow(problem: Problem, excess: float) -> float:
    """Return the seconds that bytes beyond the budget cost."""
    return PENALTY * max(0.0, max(0.0, excess) / problem.budget - ROUNDING)


def hull(kind: LayerKind, in_flight: float, limit: float) -> Hull | None:
    """Return the lower hull of the choices with workspaces within `limit`; None without any."""
    key = in_flight, bisect_right(kind.workspaces, limit)
    if key not in kind.hulls:
        kind.hulls[key] = _build_hull(kind.choices, in_flight, limit)
    return kind.hulls[key]


def _build_hull(choices: Sequence[Choice], in_flight: float, limit: float) -> Hull | None:
    path: list[tuple[float, float, int]] = []
    segments: list[tuple[float, float]] = []
    for point in sorted(
        (choice.backward, choice.state + in_flight * choice.activations, number)
        for number, choice in enumerate(choices)
        if choice.workspace <= limit
    ):
        if path and point[1] >= path[-1][1]:
            continue
        while path:
            saved = path[-1][1] - point[1]
            rate = (point[0] - path[-1][0]) / saved
            if not segments or segments[-1][0] < rate:
                segments.append((rate, saved))
                break
            segments.pop()
            path.pop()
        path.append(point)
    if not path:
        return None
    return Hull([number for *_, number in path], path[0][0], path[0][1], segments)


class Step(NamedTuple):
    """A layer takes the next smaller choice of its hull."""

    rate: float
    """Seconds per byte saved."""
    column: int
    saved: float
    """Bytes."""
    choice: int
    smaller: int


class Relaxation:
    """Linear programs over columns of layers: one for every workspace limit.

    `limits` has the smallest workspace to count, then those of larger choices, ascending.
    """

    def __init__(self, problem: Problem, columns: Columns, min_workspace: float) -> None:
        self.problem, self.columns = problem, columns
        kinds = {kind for kind, _ in columns}
        larger = {w for kind in kinds for w in problem.kinds[kind].workspaces if w > min_workspace}
        self.limits = np.array([min_workspace, *sorted(larger)])
        self.hulls = [
            [hull(problem.kinds[kind], in_flight, limit) for kind, in_flight in columns]
            for limit in self.limits
        ]
        self.steps = [[*self._sort_steps(hulls)] for hulls in self.hulls]
        """By rising seconds per byte, for every limit."""
        self.seconds = np.array([[h.seconds if h else UNUSABLE for h in row] for row in self.hulls])
        self.bytes = np.array([[h.bytes if h else 0.0 for h in row] for row in self.hulls])
        length = max(map(len, self.steps))
        padding = [Step(0.0, 0, 0.0, 0, 0)]
        padded = [steps + padding * (length - len(steps)) for steps in self.steps]
        shape = len(padded), length
        self.rates, self.step_columns, self.saved = (
            np.array([[step[n] for step in steps] for steps in padded]).reshape(shape)
            for n in (0, 1, 2)
        )
        self.step_columns = self.step_columns.astype(np.int64)

    def _sort_steps(self, hulls: Sequence[Hull | None]) -> list[Step]:
        return sorted(
            Step(rate, column, saved, *pair)
            for column, column_hull in enumerate(hulls)
            if column_hull is not None
            for pair, (rate, saved) in zip(
                pairwise(column_hull.choices), column_hull.segments, strict=True
            )
        )

    def backward(self, counts: Integers, budget: Numbers, limit: int | slice) -> Numbers:
        """Return the minimum seconds of the backward passes: of one row of layer counts for a slice
        of limits, or of many rows for one limit. `budget` is without the workspace."""
        excess = (counts * self.bytes[limit]).sum(axis=-1) - budget
        saved = counts[..., self.step_columns[limit]] * self.saved[limit]
        before = np.cumsum(saved, axis=-1) - saved
        taken = np.clip(excess[..., None] - before, 0.0, saved)
        seconds = (counts * self.seconds[limit]).sum(axis=-1) + (taken * self.rates[limit]).sum(-1)
        overflow = np.maximum(excess - saved.sum(axis=-1), 0.0) / self.problem.budget
        penalty: Numbers = PENALTY * np.maximum(overflow - ROUNDING, 0.0)
        backward: Numbers = seconds + penalty
        return backward

    def table(self, counts: Integers, budget: Numbers) -> Numbers:
        """Return a lower bound on the backward seconds of every row of layer counts."""
        size = -(-len(self.limits) // MAX_LIMITS)
        fastest = (counts * self.seconds[-1]).sum(axis=-1) * (1 + ROUNDING)
        seconds = np.full(len(counts), np.inf)
        for end in range(len(self.limits), 0, -size):
            # Where the fastest choices fit within a larger limit, no smaller limit is better.
            [slower] = np.nonzero(seconds > fastest)
            if not len(slower):
                break
            row_budget = budget[slower] - self.limits[max(0, end - size)]
            limited = self.backward(counts[slower], row_budget, end - 1)
            seconds[slower] = np.minimum(seconds[slower], limited)
        return seconds

    def choose(
        self, counts: Integers, budget: float, weights: Sequence[float], *, exact: bool
    ) -> list[list[int]]:
        """Return the numbers of whole layers by column and choice, over all limits.

        The weight of a column decides between equal times. Without `exact`, no layers are chosen
        again.
        """
        bounds = self.backward(counts, budget - self.limits, slice(None))
        best, best_seconds = None, math.inf
        for limit in np.argsort(bounds, kind="stable"):
            if best is not None and (not exact or bounds[limit] >= best_seconds * (1 - GAP)):
                break
            room = budget - float(self.limits[limit])
            numbers = self._round(counts, room, limit)
            seconds, size = self._sum(numbers, weights)
            if exact and seconds > bounds[limit] * (1 + GAP):
                chosen = self._choose_few(numbers, room, float(self.limits[limit]), weights)
                if chosen is not None:
                    numbers = chosen
                    seconds, size = self._sum(numbers, weights)
            seconds += price_overflow(self.problem, size - room)
            if seconds < best_seconds:
                best, best_seconds = numbers, seconds
        assert best is not None, "the largest limit allows all choices"
        return best

    def _round(self, counts: Integers, budget: float, limit: int) -> list[list[int]]:
        """Choose as linear programming does; the layer that it divides takes its smaller choice."""
        excess = float(counts @ self.bytes[limit]) - budget
        numbers = [[0] * len(self.problem.kinds[kind].choices) for kind, _ in self.columns]
        for column, column_hull in enumerate(self.hulls[limit]):
            if column_hull is not None:
                numbers[column][column_hull.choices[0]] = int(counts[column])
        for _, column, saved, choice, smaller in self.steps[limit]:
            if excess <= 0:
                break
            moved = min(numbers[column][choice], math.ceil(excess / saved))
            numbers[column][choice] -= moved
            numbers[column][smaller] += moved
            excess -= moved * saved
        return numbers

    def _sum(self, numbers: list[list[int]], weights: Sequence[float]) -> tuple[float, float]:
        """Return weighted seconds, and bytes without workspace."""
        seconds = size = 0.0
        for (kind, in_flight), weight, by_choice in zip(
            self.columns, weights, numbers, strict=True
        ):
            for n, choice in zip(by_choice, self.problem.kinds[kind].choices, strict=True):
                if n:
                    seconds += weight * n * choice.backward
                    size += n * (choice.state + in_flight * choice.activations)
        return seconds, size

    def _choose_few(
        self, numbers: list[list[int]], budget: float, workspace: float, weights: Sequence[float]
    ) -> list[list[int]] | None:
        """Keep all layers but a few, and choose those exactly; None if nothing fits.

        Selections of layers are Pareto fronts: bytes, seconds and the numbers of layers by choice.
        """
        used = [column for column, by_choice in enumerate(numbers) if any(by_choice)]
        kept = [[*by_choice] for by_choice in numbers]
        free: list[tuple[int, int]] = []
        for column in used:
            layers = [*islice(_take_turns(numbers[column]), max(1, EXACT_LAYERS // len(used)))]
            for choice in layers:
                kept[column][choice] -= 1
            free.append((column, len(layers)))
        budget -= self._sum(kept, weights)[1]
        sizes = [len(by_choice) for by_choice in numbers]
        starts = np.cumsum([0, *sizes])
        front = np.zeros((1, 2)), np.zeros((1, starts[-1]), dtype=np.int64)
        for column, count in free:
            kind, in_flight = self.columns[column]
            usable = [
                (number, choice)
                for number, choice in enumerate(self.problem.kinds[kind].choices)
                if choice.workspace <= workspace
            ]
            costs = np.array(
                [
                    (c.state + in_flight * c.activations, weights[column] * c.backward)
                    for _, c in usable
                ]
            )
            layer = np.eye(starts[-1], dtype=np.int64)[
                [starts[column] + number for number, _ in usable]
            ]
            for _ in range(count):
                front = _join_fronts(front, (costs, layer), budget)
        if not len(front[0]):
            return None
        chosen = front[1][-1]
        return [
            [n + int(m) for n, m in zip(by_choice, chosen[start:], strict=False)]
            for by_choice, start in zip(kept, starts[:-1], strict=True)
        ]


Front = tuple[Numbers, Integers]
"""Selections of layers by rising bytes and falling seconds: [selections, (bytes, seconds)], and
numbers of layers [selections, choices of all columns]."""


def _join_fronts(a: Front, b: Front, budget: float) -> Front:
    """Return the Pareto front of both selections together, within the budget."""
    costs = (a[0][:, None] + b[0]).reshape(-1, 2)
    [fits] = np.nonzero(costs[:, 0] <= budget)
    order = fits[np.lexsort((costs[fits, 1], costs[fits, 0]))]
    fastest = np.minimum.accumulate(costs[order, 1])
    front = order[np.append(True, fastest[1:] < fastest[:-1])[: len(order)]]
    a_indices, b_indices = np.divmod(front, max(1, len(b[0])))
    return costs[front], a[1][a_indices] + b[1][b_indices]


def _take_turns(numbers: Sequence[int]) -> Iterator[int]:
    """Yield a choice for each of its layers; choices take turns."""
    for turn in range(max(numbers)):
        yield from [number for number, count in enumerate(numbers) if count > turn]
