"""The division of the layers into stages, with the choices of each stage.

One chunk for each stage: divisions are completed stage by stage in the order of their bounds. The
choices of each stage are exact (knapsack), and the price is the simulated step. The search ends
when no bound is below the best price: then nothing is better. It also ends after `MOST` divisions
or `EVENTS` simulated passes; the solution then states the bound that is left.

Interleaved: all divisions where they are few; otherwise those that lie on a path of moves of one
layer, as the trainer's default cuts are found (trainer/layout/cuts.py).
"""

from __future__ import annotations

import heapq
import math
from itertools import combinations

import numpy as np

from ...trainer.layout.cuts import Cuts, neighbours
from .bounds import Bounds, least_cuts, quick_bound
from .frontier import Known
from .interleaved import DivisionBound, least_division, starts
from .knapsack import Knapsack
from .linear import ROUNDING
from .problem import Problem, Solution, StagePlan, price

EVENTS = 200_000
"""Most simulated passes of a problem: about half a second."""
LEAST, MOST = 4, 200
"""Least divisions that are priced, however many passes a step has, and most of them."""
MOVES = 4
"""Neighbours of a division of an interleaved schedule that are priced, least bound first."""
FEW = 500
"""Divisions of an interleaved schedule that are all tried."""


def solve(
    problem: Problem, ceiling: float = math.inf, known: Known | None = None
) -> Solution | None:
    """Return the best division and choices below a price; None if there are none. `known` are
    frontiers of problems that are nearly alike."""
    pricing = Pricing(problem, known)
    if problem.all_chunks == 1:
        pricing.take(())
        bound = pricing.best
    elif problem.chunks > 1:
        _interleaved(problem, pricing, ceiling)
        bound = quick_bound(problem)
    else:
        bound = _best_first(problem, pricing, ceiling)
    if pricing.cuts is None or pricing.best >= ceiling:
        return None
    return Solution(pricing.best, pricing.cuts, pricing.stages, min(bound, pricing.best))


class Pricing:
    """Prices of divisions, and the best so far."""

    def __init__(self, problem: Problem, known: Known | None) -> None:
        self.problem = problem
        self.knapsack = Knapsack(problem, known)
        self.best = math.inf
        self.cuts: Cuts | None = None
        self.stages: tuple[StagePlan, ...] = ()
        passes = 2 * problem.micro_batches * problem.all_chunks
        self.left = min(MOST, max(LEAST, EVENTS // passes))
        """Divisions that may still be priced."""
        self._prices: dict[Cuts, float] = {}

    def take(self, cuts: Cuts) -> float:
        """Price a division; infinite if it does not fit into the memory."""
        if cuts not in self._prices:
            self.left -= 1
            plans = self.plans(cuts)
            found = math.inf if plans is None else price(self.problem, plans)
            self._prices[cuts] = found
            if plans is not None and found < self.best:
                self.best, self.cuts, self.stages = found, cuts, plans
        return self._prices[cuts]

    def plans(self, cuts: Cuts) -> tuple[StagePlan, ...] | None:
        ranges = self.problem.ranges(cuts)
        found = []
        for stage in range(self.problem.stages):
            plan = self.knapsack.stage(stage, [ranges[n] for n in self.problem.own(stage)])
            if plan is None:
                return None
            found.append(plan)
        return tuple(found)


def _best_first(problem: Problem, pricing: Pricing, ceiling: float) -> float:
    """Price divisions in the order of their bounds; return the bound of those that are left."""
    bounds = Bounds(problem)
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
                if pricing.cuts is None:  # bounds fit, and choices of whole layers do not
                    pricing.take(least_cuts(problem)[1])
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


def _interleaved(problem: Problem, pricing: Pricing, ceiling: float) -> None:
    """Price all divisions if they are few, else those on paths of moves of one layer. Paths start
    from the divisions of `starts`. If none of those fits, and any price will do, one starts from
    another division that fits."""
    layers, chunks = len(problem.layers), problem.all_chunks
    bound = DivisionBound(problem)

    def limit() -> float:
        return min(pricing.best, ceiling)

    def follow(now: Cuts) -> None:
        price = pricing.take(now)
        while pricing.left > 0:
            near = sorted((bound(cuts, limit()), cuts) for cuts in neighbours(now, layers))
            tried = [cuts for least, cuts in near[:MOVES] if least < limit()]
            best = min((pricing.take(cuts), cuts) for cuts in [*tried, now])
            if best[0] >= price:
                break
            price, now = best

    if math.comb(layers - 1, chunks - 1) <= min(FEW, pricing.left):
        for cuts in combinations(range(1, layers), chunks - 1):
            if bound(cuts, limit()) < limit():
                pricing.take(cuts)
        return
    for start in sorted(starts(problem), key=bound):
        if bound(start) < limit():
            follow(start)
    if pricing.cuts is None and math.isinf(ceiling):
        least = least_division(problem, problem.budget * (1 + ROUNDING), problem.budget)
        if least.cuts is not None:
            follow(least.cuts)
