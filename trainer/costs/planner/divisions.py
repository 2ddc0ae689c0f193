"""The division of the layers into stages, with the choices of each stage.

One chunk for each stage: divisions are completed stage by stage in the order of their bounds. The
choices of each stage are exact (knapsack), and the price is the simulated step. The search ends
when no bound is below the best price: then nothing is better. It also ends after `EVENTS` simulated
passes; the solution then states the bound that is left.

Interleaved: all divisions where they are few; otherwise those that lie on a path of moves of one
layer, as the trainer's default cuts are found (trainer/pipeline/cuts.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from itertools import combinations

import numpy as np

from ...pipeline.cuts import Cuts, even, least_greatest, neighbours
from .bounds import Bounds, quick_bound
from .knapsack import Knapsack
from .problem import Problem, Solution, StagePlan, price

EVENTS = 1_000_000
"""Most simulated passes of a problem: about two seconds."""
LEAST = 8
"""Least divisions that are priced, however many passes a step has."""
FEW = 500
"""Divisions of an interleaved schedule that are all tried."""


def solve(
    problem: Problem, ceiling: float = math.inf, bounds: Bounds | None = None
) -> Solution | None:
    """Return the best division and choices below a price; None if there are none."""
    pricing = Pricing(problem)
    if problem.all_chunks == 1:
        pricing.take(())
        bound = pricing.best
    elif problem.chunks > 1:
        _interleaved(problem, pricing)
        bound = quick_bound(problem)
    else:
        bound = _best_first(problem, pricing, bounds or Bounds(problem), ceiling)
    if pricing.cuts is None or pricing.best >= ceiling:
        return None
    return Solution(pricing.best, pricing.cuts, pricing.stages, min(bound, pricing.best))


class Pricing:
    """Prices of divisions, and the best so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.knapsack = Knapsack(problem)
        self.best = math.inf
        self.cuts: Cuts | None = None
        self.stages: tuple[StagePlan, ...] = ()
        passes = 2 * problem.micro_batches * problem.all_chunks
        self.left = max(LEAST, EVENTS // passes)
        """Divisions that may still be priced."""
        self._prices: dict[tuple[object, ...], float] = {}

    def take(self, cuts: Cuts) -> float:
        """Price a division; infinite if it does not fit into the memory."""
        plans = self.plans(cuts)
        if plans is None:
            return math.inf
        key = tuple((plan.forward, plan.backward, plan.update) for plan in plans)
        if key not in self._prices:
            self._prices[key] = price(self.problem, plans)
            self.left -= 1
        found = self._prices[key]
        if found < self.best:
            self.best, self.cuts, self.stages = found, cuts, plans
        return found

    def plans(self, cuts: Cuts) -> tuple[StagePlan, ...] | None:
        ranges = self.problem.ranges(cuts)
        found = []
        for stage in range(self.problem.stages):
            plan = self.knapsack.stage(stage, [ranges[n] for n in self.problem.own(stage)])
            if plan is None:
                return None
            found.append(plan)
        return tuple(found)


def _best_first(problem: Problem, pricing: Pricing, bounds: Bounds, ceiling: float) -> float:
    """Price divisions in the order of their bounds; return the bound of those that are left."""
    p, hop = problem.stages, 2 * problem.message
    # (bound, stages that have layers, cuts, passes of those stages, bound of their steps)
    heap: list[tuple[float, int, Cuts, float, float]] = [(0.0, 0, (), 0.0, 0.0)]
    while heap:
        bound, stage, cuts, passed, step = heapq.heappop(heap)
        if bound >= min(pricing.best, ceiling):
            return bound
        if stage == p:
            pricing.take(cuts[:-1])
            if pricing.left <= 0:
                return bound
            continue
        first = cuts[-1] if cuts else 0
        own = bounds.times[stage, first]
        steps = np.maximum(step, passed + bounds.alone[stage, first])
        after = passed + own + (hop if stage < p - 1 else 0.0)
        update = bounds.first_updates[cuts[0]] if cuts else bounds.first_updates
        whole = np.maximum(steps, after + bounds.rest[stage + 1]) + update
        for end in np.flatnonzero(whole < min(pricing.best, ceiling)):
            node = (*cuts, int(end)), float(after[end]), float(steps[end])
            heapq.heappush(heap, (float(whole[end]), stage + 1, *node))
    return math.inf


def _interleaved(problem: Problem, pricing: Pricing) -> None:
    """Price all divisions if they are few, else those on paths of moves of one layer."""
    layers, chunks = len(problem.layers), problem.all_chunks
    if math.comb(layers - 1, chunks - 1) <= FEW:
        for cuts in combinations(range(1, layers), chunks - 1):
            pricing.take(cuts)
        return
    for start in _starts(problem):
        now = pricing.take(start)
        while pricing.left > 0:
            near = min(neighbours(start, layers), key=pricing.take, default=start)
            if not pricing.take(near) < now:
                break
            start, now = near, pricing.take(near)


def _starts(problem: Problem) -> Iterable[Cuts]:
    """Return divisions into equal numbers, equal times and equal memory."""
    chunks = problem.all_chunks
    sorts = [problem.sorts[number] for number in problem.layers]
    times = [sort.forward + min(c.backward for c in sort.choices) for sort in sorts]
    sizes = [min(c.held + problem.stages * c.kept for c in sort.choices) for sort in sorts]
    head = problem.last.forward + problem.last.backward
    yield from {
        even(len(sorts), chunks),
        least_greatest(times, chunks, head),
        least_greatest(sizes, chunks, problem.last.held + problem.last.kept),
    }
