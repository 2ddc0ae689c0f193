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
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .problem import Choice, Integers, LayerKind, Numbers, Problem

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


def price_overflow(problem: Problem, excess: float) -> float:
    """Return the seconds that bytes beyond the budget cost."""
    return PENALTY * max(0.0, max(0.0, excess) / problem.budget - ROUNDING)


class Hull(NamedTuple):
    """Lower hull of a kind's choices in bytes and seconds."""

    choices: Sequence[int]
    """Numbers of the choices, fastest first; none if all have larger workspaces."""
    seconds: float
    """Seconds of the fastest."""
    bytes: float
    segments: Sequence[tuple[float, float]]
    """Between neighbours: seconds per byte saved, and bytes saved. Rates rise."""


def hull(kind: LayerKind, in_flight: float, limit: float = math.inf) -> Hull:
    """Return the lower hull of the choices with workspaces within the limit."""
    key = in_flight, bisect_right(kind.workspaces, limit)
    if key not in kind.hulls:
        kind.hulls[key] = _build_hull(kind.choices, in_flight, limit)
    result: Hull = kind.hulls[key]
    return result


def _build_hull(choices: Sequence[Choice], in_flight: float, limit: float) -> Hull:
    path: list[tuple[float, float, int]] = []
    segments: list[tuple[float, float]] = []
    for point in sorted(
        (choice.backward, choice.bytes(in_flight), number)
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
    seconds, size = path[0][:2] if path else (UNUSABLE, 0.0)
    return Hull([number for *_, number in path], seconds, size, segments)


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
    """Linear programs over columns of layers: a kind and its micro-batches in flight. There is one
    for every workspace limit, in rising order."""

    def __init__(self, problem: Problem, in_flight: Sequence[float]) -> None:
        kinds = problem.all_kinds
        self.problem = problem
        self.columns = [(kind, n) for n in dict.fromkeys(in_flight) for kind in range(len(kinds))]
        self.choices = [kinds[kind].choices for kind, _ in self.columns]
        limits = sorted({size for kind in kinds for size in kind.workspaces})
        self.limits = np.array(limits)
        hulls = [[hull(kinds[kind], n, limit) for kind, n in self.columns] for limit in limits]
        self.fastest = [[h.choices[:1] for h in row] for row in hulls]
        self.seconds = np.array([[h.seconds for h in row] for row in hulls])
        self.bytes = np.array([[h.bytes for h in row] for row in hulls])
        self.steps = [_sort_steps(row) for row in hulls]
        """By rising seconds per byte, for every limit."""
        length = max(map(len, self.steps))
        padded = [
            [*steps, *[Step(0.0, 0, 0.0, 0, 0)] * (length - len(steps))] for steps in self.steps
        ]
        table = np.array(padded).reshape(len(limits), length, 5)
        self.rates, self.saved = table[:, :, 0], table[:, :, 2]
        self.step_columns = table[:, :, 1].astype(np.int64)

    def backward(self, counts: Integers, budget: Numbers, limit: int | slice) -> Numbers:
        """Return the minimum seconds of the backward passes: of one row of layer counts for a slice
        of limits, or of many rows for one limit. `budget` is without the workspace."""
        excess = (counts * self.bytes[limit]).sum(axis=-1) - budget
        saved = counts[..., self.step_columns[limit]] * self.saved[limit]
        before = np.cumsum(saved, axis=-1) - saved
        taken = np.clip(excess[..., None] - before, 0.0, saved)
        seconds = (counts * self.seconds[limit]).sum(axis=-1) + (taken * self.rates[limit]).sum(-1)
        overflow = np.maximum(excess - saved.sum(axis=-1), 0.0) / self.problem.budget
        backward: Numbers = seconds + PENALTY * np.maximum(overflow - ROUNDING, 0.0)
        return backward

    def table(self, counts: Integers, budget: Numbers) -> Numbers:
        """Return a lower bound on the backward seconds of every row of layer counts."""
        size = -(-len(self.limits) // MAX_LIMITS)
        fastest = (counts * self.seconds[-1]).sum(axis=-1) * (1 + ROUNDING)
        seconds = np.full(len(counts), np.inf)
        for end in range(len(self.limits), 0, -size):
            # Where the fastest choices fit within a larger limit, no smaller limit is better.
            [slower] = np.nonzero(seconds > fastest)
            row_budget = budget[slower] - self.limits[max(0, end - size)]
            limited = self.backward(counts[slower], row_budget, end - 1)
            seconds[slower] = np.minimum(seconds[slower], limited)
        return seconds

    def choose(self, counts: Integers, budget: float, *, exact: bool) -> list[list[int]]:
        """Return the numbers of whole layers by column and choice, over all limits. Without
        `exact`, no layers are chosen again."""
        bounds = self.backward(counts, budget - self.limits, slice(None))
        best, best_seconds = None, math.inf
        for limit in np.argsort(bounds, kind="stable"):
            if best is not None and (not exact or bounds[limit] >= best_seconds * (1 - GAP)):
                break
            room = budget - float(self.limits[limit])
            numbers = self._round(counts, room, limit)
            seconds, size = self._sum(numbers)
            if exact and seconds > bounds[limit] * (1 + GAP):
                numbers = self._choose_few(numbers, room, float(self.limits[limit]))
                seconds, size = self._sum(numbers)
            seconds += price_overflow(self.problem, size - room)
            if seconds < best_seconds:
                best, best_seconds = numbers, seconds
        assert best is not None, "the largest limit allows all choices"
        return best

    def _round(self, counts: Integers, budget: float, limit: int) -> list[list[int]]:
        """Choose as linear programming does; the layer that it divides takes its smaller choice."""
        excess = float(counts @ self.bytes[limit]) - budget
        numbers = [[0] * len(choices) for choices in self.choices]
        for column, fastest in enumerate(self.fastest[limit]):
            for choice in fastest:
                numbers[column][choice] = int(counts[column])
        for _, column, saved, choice, smaller in self.steps[limit]:
            if excess <= 0:
                break
            moved = min(numbers[column][choice], math.ceil(excess / saved))
            numbers[column][choice] -= moved
            numbers[column][smaller] += moved
            excess -= moved * saved
        return numbers

    def _sum(self, numbers: list[list[int]]) -> tuple[float, float]:
        """Return seconds, and bytes without workspace."""
        layers = [
            (n * choice.backward, n * choice.bytes(in_flight))
            for (_, in_flight), choices, by_choice in zip(
                self.columns, self.choices, numbers, strict=True
            )
            for n, choice in zip(by_choice, choices, strict=True)
            if n
        ]
        return sum(seconds for seconds, _ in layers), sum(size for _, size in layers)

    def _choose_few(
        self, numbers: list[list[int]], budget: float, workspace: float
    ) -> list[list[int]]:
        """Keep all layers but a few, and choose those again, exactly."""
        used = [n for n, by_choice in enumerate(numbers) if any(by_choice) and len(by_choice) > 1]
        kept = [[*by_choice] for by_choice in numbers]
        columns: list[int] = []
        for column in used:
            layers = [choice for choice, n in enumerate(numbers[column]) for _ in range(n)]
            for choice in layers[:: -len(layers) * len(used) // EXACT_LAYERS]:
                kept[column][choice] -= 1
                columns.append(column)
        budget -= self._sum(kept)[1]
        # The Pareto front of all selections for the columns so far: bytes and seconds, with the
        # choice for each column.
        costs, selected = np.zeros((1, 2)), np.zeros((1, 0), dtype=np.int64)
        for column in columns:
            in_flight = self.columns[column][1]
            options = np.array(
                [
                    (choice.bytes(in_flight), choice.backward, number)
                    for number, choice in enumerate(self.choices[column])
                    if choice.workspace <= workspace
                ]
            )
            sums = (costs[:, None] + options[:, :2]).reshape(-1, 2)
            [fits] = np.nonzero(sums[:, 0] <= budget)
            if not len(fits):
                return numbers
            order = fits[np.lexsort((sums[fits, 1], sums[fits, 0]))]
            fastest = np.minimum.accumulate(sums[order, 1])
            front = order[np.append(True, fastest[1:] < fastest[:-1])]
            before, number = np.divmod(front, len(options))
            costs = sums[front]
            selected = np.column_stack([selected[before], options[number, 2].astype(np.int64)])
        for column, choice in zip(columns, selected[-1], strict=True):
            kept[column][choice] += 1
        return kept


def _sort_steps(hulls: Sequence[Hull]) -> list[Step]:
    return sorted(
        Step(rate, column, saved, *pair)
        for column, column_hull in enumerate(hulls)
        for pair, (rate, saved) in zip(
            pairwise(column_hull.choices), column_hull.segments, strict=True
        )
    )
