"""Least backward time of a stage's layers by linear programming: a bound of their exact choices.

The layers that do not fit take the choices that save most memory for each second, fractions of
layers included. Memory has a part that adds up over layers, and a greatest part, the work: each
limit of the work has its own choices, and leaves its own room for the other part.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from .problem import Choice, Hull, Integers, Numbers, Problem, Sort

ROUNDING = 1e-9
"""Part of the budget by which rounded sums may exceed it."""

Parts = Sequence[tuple[int, int, int]]
"""Sort, layers of it, and micro-batches that they have alive."""


def hull(sort: Sort, alive: int, limit: float) -> Hull | None:
    """Return the fastest choice with work within `limit`, and the lower hull; None without one."""
    key = alive, bisect_right(sort.works, limit)
    if key not in sort.hulls:
        sort.hulls[key] = _hull([c for c in sort.choices if c.work <= limit], alive)
    return sort.hulls[key]


def _hull(choices: Iterable[Choice], alive: int) -> Hull | None:
    points: list[tuple[float, float]] = []
    for seconds, size in sorted((c.backward, c.held + alive * c.kept) for c in choices):
        if points and size >= points[-1][1]:
            continue
        while len(points) > 1:  # each choice costs more for a byte saved than the one before
            (first, most), (last, more) = points[-2:]
            if (seconds - last) * (most - more) > (last - first) * (more - size):
                break
            points.pop()
        points.append((seconds, size))
    if not points:
        return None
    segments = [
        ((backward - seconds) / (size - less), size - less)
        for (seconds, size), (backward, less) in pairwise(points)
    ]
    return *points[0], segments


def least_seconds(problem: Problem, parts: Parts, room: float, limit: float = math.inf) -> float:
    """Return the least backward time of these layers by linear programming, with choices whose work
    is within `limit`; infinite if they exceed the room."""
    total, excess = 0.0, -room
    slower = []
    for sort, count, alive in parts:
        if not count:
            continue
        found = hull(problem.sorts[sort], alive, limit)
        if found is None:
            return math.inf
        seconds, size, others = found
        total += count * seconds
        excess += count * size
        slower.append((count, others))
    if excess <= 0:
        return total
    segments = [(rate, count * saved) for count, others in slower for rate, saved in others]
    for rate, saved in sorted(segments):
        if excess <= 0:
            break
        taken = min(excess, saved)
        total += taken * rate
        excess -= taken
    return math.inf if excess > ROUNDING * problem.budget else total


def least_rate(problem: Problem, parts: Parts, room: float, limit: float) -> float:
    """Return the seconds of the last byte that `least_seconds` saves; 0 if everything fits."""
    excess, segments = -room, []
    for sort, count, alive in parts:
        found = hull(problem.sorts[sort], alive, limit)
        assert found is not None, "the bound is finite"
        _, size, others = found
        excess += count * size
        segments += [(rate, count * saved) for rate, saved in others]
    last = 0.0
    for rate, saved in sorted(segments):
        if excess <= 0:
            break
        excess, last = excess - saved, rate
    return last


def limits_of(problem: Problem, sorts: Iterable[int], least: float) -> list[float]:
    """Return the limits of the work that stages with layers of these sorts may have, in rising
    order: limits between them allow the same choices, and leave less room."""
    found = {work for sort in sorts for work in problem.sorts[sort].works if work > least}
    return [least, *sorted(found)]


def least_of_limits(problem: Problem, parts: Parts, room: float, limits: Sequence[float]) -> float:
    """Return the least of `least_seconds` over all limits of the work, which takes its own room.

    Groups of limits are bounded together: by the choices of the greatest of them in the room of the
    least. The group of the least bound is split, until it is one limit.
    """
    everything = least_seconds(problem, parts, room - limits[0], limits[-1])
    waiting = [(everything, 0, len(limits))] if math.isfinite(everything) else []
    while waiting:
        seconds, first, end = heappop(waiting)
        if end - first == 1:
            return seconds
        middle = (first + end) // 2
        for low, high in ((first, middle), (middle, end)):
            here = least_seconds(problem, parts, room - limits[low], limits[high - 1])
            if math.isfinite(here):
                heappush(waiting, (here, low, high))
    return math.inf


def least_backward(
    problem: Problem, counts: Integers, alive: int, room: Numbers, limit: float
) -> Numbers:
    """Return `least_seconds` of so many layers of each sort [ranges, sorts], in the room of each
    range."""
    time, excess = np.zeros(len(counts)), -room
    segments: list[tuple[float, int, float]] = []
    for number in range(len(problem.sorts)):
        found = hull(problem.sorts[number], alive, limit)
        if found is None:
            time = np.where(counts[:, number] > 0, np.inf, time)
            continue
        seconds, size, others = found
        time = time + counts[:, number] * seconds
        excess = excess + counts[:, number] * size
        segments += [(rate, number, saved) for rate, saved in others]
    for rate, number, saved in sorted(segments):
        taken = np.clip(excess, 0.0, counts[:, number] * saved)
        time += taken * rate
        excess -= taken
    return np.where(excess > ROUNDING * problem.budget, np.inf, time)
