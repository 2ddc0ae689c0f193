"""Minimum backward time of a stage's layers by linear programming: a lower bound on exact choices.

Layers that do not fit take the choices that save most memory per second, in fractions of layers.
State and activations add up over layers, while only the largest workspace counts: every workspace
limit allows its own choices, and leaves its own budget for the sum.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from .problem import Choice, Hull, Integers, LayerKind, Numbers, Problem

ROUNDING = 1e-9
"""Fraction of the budget by which rounded sums may exceed it."""

LayerGroups = Sequence[tuple[int, int, int]]
"""Kind, number of layers, and their micro-batches in flight."""


def hull(kind: LayerKind, in_flight: int, limit: float) -> Hull | None:
    """Return the lower hull of the choices with workspaces within `limit`; None without any."""
    key = in_flight, bisect_right(kind.workspaces, limit)
    if key not in kind.hulls:
        kind.hulls[key] = _build_hull(kind.choices, in_flight, limit)
    return kind.hulls[key]


def _build_hull(choices: Sequence[Choice], in_flight: int, limit: float) -> Hull | None:
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


def min_seconds(
    problem: Problem, groups: LayerGroups, budget: float, limit: float = math.inf
) -> float:
    """Return the minimum backward time by linear programming, with workspaces within `limit`;
    infinite if the layers exceed the budget."""
    total, excess = 0.0, -budget
    kind_segments = []
    for kind, count, in_flight in groups:
        if not count:
            continue
        kind_hull = hull(problem.kinds[kind], in_flight, limit)
        if kind_hull is None:
            return math.inf
        total += count * kind_hull.seconds
        excess += count * kind_hull.bytes
        kind_segments.append((count, kind_hull.segments))
    if excess <= 0:
        return total
    steps = [(rate, count * saved) for count, segments in kind_segments for rate, saved in segments]
    for rate, saved in sorted(steps):
        if excess <= 0:
            break
        taken = min(excess, saved)
        total += taken * rate
        excess -= taken
    return math.inf if excess > ROUNDING * problem.budget else total


def workspace_limits(problem: Problem, kinds: Iterable[int], lower_limit: float) -> list[float]:
    """Return the workspace limits to try for these kinds, in rising order. Limits in between allow
    the same choices, and leave less budget."""
    workspaces = {
        workspace
        for kind in kinds
        for workspace in problem.kinds[kind].workspaces
        if workspace > lower_limit
    }
    return [lower_limit, *sorted(workspaces)]


def order_limits(
    problem: Problem, groups: LayerGroups, budget: float, limits: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """Yield `min_seconds` and its workspace limit, by rising seconds, for the limits within which
    the layers fit; the workspace itself takes its limit from the budget.

    Branch and bound over ranges of limits: a range is bounded by the choices of its largest limit
    within the budget of its smallest. The range with the lowest bound is halved until it is one
    limit.
    """
    waiting: list[tuple[float, int, int]] = []

    def add(first: int, end: int) -> None:
        seconds = min_seconds(problem, groups, budget - limits[first], limits[end - 1])
        if math.isfinite(seconds):
            heappush(waiting, (seconds, first, end))

    add(0, len(limits))
    while waiting:
        seconds, first, end = heappop(waiting)
        if end - first == 1:
            yield seconds, limits[first]
        else:
            middle = (first + end) // 2
            add(first, middle)
            add(middle, end)


def min_seconds_over_limits(
    problem: Problem, groups: LayerGroups, budget: float, limits: Sequence[float]
) -> float:
    """Return the minimum of `min_seconds` over all workspace limits."""
    return next(order_limits(problem, groups, budget, limits), (math.inf, 0.0))[0]


def min_backward(
    problem: Problem, counts: Integers, in_flight: int, budget: Numbers, limit: float
) -> Numbers:
    """Return `min_seconds` by range; `counts` has layers [ranges, kinds], `budget` bytes."""
    time, excess = np.zeros(len(counts)), -budget
    segments: list[tuple[float, int, float]] = []
    for number in range(len(problem.kinds)):
        kind_hull = hull(problem.kinds[number], in_flight, limit)
        if kind_hull is None:
            time = np.where(counts[:, number] > 0, np.inf, time)
            continue
        time = time + counts[:, number] * kind_hull.seconds
        excess = excess + counts[:, number] * kind_hull.bytes
        segments += [(rate, number, saved) for rate, saved in kind_hull.segments]
    for rate, number, saved in sorted(segments):
        taken = np.minimum(np.maximum(excess, 0.0), counts[:, number] * saved)
        time += taken * rate
        excess -= taken
    return np.where(excess > ROUNDING * problem.budget, np.inf, time)
