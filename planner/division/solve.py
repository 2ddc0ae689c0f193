"""Divisions of the layers into stages, with exact choices for every stage.

One chunk per stage: best-first search completes divisions stage by stage in the order of their
bounds. The knapsack gives exact choices, and the simulated step is the price. The search ends when
no bound is below the best price. It also ends after `MAX_PRICED` divisions or `EVENTS` simulated
passes; the solution then has the lowest open bound.

Interleaved: all divisions if they are few, else local search by moves of one layer, like the
trainer's default cuts (trainer/layout/cuts.py), with rounded choices; then exact ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from ...trainer.layout.cuts import Cuts, neighbour_cuts
from .bounds import Bounds, find_min_memory_cuts, quick_bound
from .interleaved import DivisionBound, find_min_memory_division, initial_cuts
from .knapsack import FrontierCache, Knapsack, Tie
from .linear import ROUNDING
from .problem import Problem, Solution, StagePlan, price

EVENTS = 200_000
"""Maximum number of simulated passes per problem: about half a second."""
MIN_PRICED, MAX_PRICED = 4, 200
"""Minimum and maximum number of divisions priced, whatever the passes per step."""
MOVES = 4
"""Neighbours of an interleaved division that are priced, lowest bound first."""
HOPELESS = 1.03
"""Multiple of the ceiling above which no moves are tried: they save less."""
NEAR = 1.01
"""Multiple of the best price above which choices stay rounded: exact ones save less."""
CHOSEN = 3
"""Interleaved divisions whose choices are exact: those with the lowest prices with rounded ones."""
FEW = 500
"""Maximum number of interleaved divisions that are all tried."""


def solve(
    problem: Problem,
    ceiling: float = math.inf,
    cache: FrontierCache | None = None,
    start: Cuts | None = None,
) -> Solution | None:
    """Return the best division and choices below the price `ceiling`, or None.

    `cache` has frontiers of similar problems, and `start` is a good division of one.
    """
    pricing = Pricing(problem, cache)
    if problem.all_chunks == 1:
        pricing.price_cuts(())
        bound = pricing.best
    elif problem.chunks > 1:
        _local_search(problem, pricing, ceiling, start)
        bound = quick_bound(problem)
    else:
        bound = _best_first(problem, pricing, ceiling)
    if pricing.cuts is None or pricing.best >= ceiling:
        return None
    return Solution(pricing.best, pricing.cuts, pricing.stages, min(bound, pricing.best))


class Pricing:
    """Prices divisions, and keeps the best."""

    def __init__(self, problem: Problem, cache: FrontierCache | None) -> None:
        self.problem = problem
        self.knapsack = Knapsack(problem, cache)
        self.best = math.inf
        self.cuts: Cuts | None = None
        self.stages: tuple[StagePlan, ...] = ()
        passes = 2 * problem.micro_batches * problem.all_chunks
        self.num_left = min(MAX_PRICED, max(MIN_PRICED, EVENTS // passes))
        """Divisions that may still be priced."""
        self._prices: dict[Tie | None, dict[Cuts, float]] = {None: {}, Tie.FIRST: {}, Tie.LAST: {}}

    def price_cuts(self, cuts: Cuts, tie: Tie | None = Tie.FIRST) -> float:
        """Price a division with exact choices, or (without `tie`) with rounded ones; infinite if it
        does not fit into the memory."""
        prices = self._prices[tie]
        if cuts not in prices:
            self.num_left -= 1
            stage_plans = self.stage_plans(cuts, tie)
            plan_price = math.inf if stage_plans is None else price(self.problem, stage_plans)
            prices[cuts] = plan_price
            if stage_plans is not None and plan_price < self.best:
                self.best, self.cuts, self.stages = plan_price, cuts, stage_plans
        return prices[cuts]

    def neighbours(self, cuts: Cuts) -> Iterator[Cuts]:
        """Yield the divisions with a layer less on the slowest stage; all neighbours, if a stage
        does not fit."""
        num_layers, plans = len(self.problem.layers), self.stage_plans(cuts, None)
        if plans is None:
            yield from neighbour_cuts(cuts, num_layers)
            return
        seconds = [sum(plan.forward) + sum(plan.backward) for plan in plans]
        for chunk in self.problem.stage_chunks(seconds.index(max(seconds))):
            for cut, move in ((chunk - 1, 1), (chunk, -1)):
                if 0 <= cut < len(cuts):
                    moved = (*cuts[:cut], cuts[cut] + move, *cuts[cut + 1 :])
                    if all(first < end for first, end in pairwise((0, *moved, num_layers))):
                        yield moved

    def cheapest(self, tie: Tie | None) -> list[Cuts]:
        """Return the divisions with the lowest prices of this kind."""
        return sorted(self._prices[tie], key=self._prices[tie].__getitem__)[:CHOSEN]

    def stage_plans(self, cuts: Cuts, tie: Tie | None) -> tuple[StagePlan, ...] | None:
        ranges = self.problem.ranges(cuts)
        plans = []
        for stage in range(self.problem.stages):
            chunks = [ranges[chunk] for chunk in self.problem.stage_chunks(stage)]
            plan = self.knapsack.stage(stage, chunks, tie)
            if plan is None:
                return None
            plans.append(plan)
        return tuple(plans)


def _best_first(problem: Problem, pricing: Pricing, ceiling: float) -> float:
    """Price divisions in the order of their bounds; return the lowest bound of the remaining."""
    bounds = Bounds(problem)
    p, hop = problem.stages, 2 * problem.message
    # (bound, stages that have layers, cuts, passes of those stages, bound of their steps)
    heap: list[tuple[float, int, Cuts, float, float]] = [(0.0, 0, (), 0.0, 0.0)]
    while heap:
        bound, stage, cuts, passed, step = heapq.heappop(heap)
        if bound >= min(pricing.best, ceiling):
            return bound
        if stage == p:
            pricing.price_cuts(cuts[:-1])
            if pricing.num_left <= 0:
                if pricing.cuts is None:  # bounds fit, and choices of whole layers do not
                    pricing.price_cuts(find_min_memory_cuts(problem)[1])
                return bound
            continue
        first = cuts[-1] if cuts else 0
        times = bounds.times[stage, first]
        steps = np.maximum(step, passed + bounds.alone[stage, first])
        after = passed + times + (hop if stage < p - 1 else 0.0)
        update = bounds.first_updates[cuts[0]] if cuts else bounds.first_updates
        step_bounds = np.maximum(steps, after + bounds.remaining[stage + 1]) + update
        for end in np.flatnonzero(step_bounds < min(pricing.best, ceiling)):
            node = (*cuts, int(end)), float(after[end]), float(steps[end])
            heapq.heappush(heap, (float(step_bounds[end]), stage + 1, *node))
    return math.inf


def _local_search(problem: Problem, pricing: Pricing, ceiling: float, start: Cuts | None) -> None:
    """Price all divisions if they are few, else descend from `start`, or from the best of
    `initial_cuts`, by moves of one layer out of the slowest stage.

    If no initial division fits and the ceiling is infinite, descend from one that fits.
    """
    layers, chunks = len(problem.layers), problem.all_chunks
    bound = DivisionBound(problem)

    def limit() -> float:
        return min(pricing.best, ceiling)

    def follow(now: Cuts) -> None:
        price = pricing.price_cuts(now, None)
        while pricing.num_left > 0:
            near = sorted((bound(cuts, limit()), cuts) for cuts in pricing.neighbours(now))
            tried = [cuts for lower_bound, cuts in near[:MOVES] if lower_bound < limit()]
            best = min((pricing.price_cuts(cuts, None), cuts) for cuts in [*tried, now])
            if best[0] >= price:
                break
            price, now = best

    few = math.comb(layers - 1, chunks - 1) <= min(FEW, pricing.num_left)
    if few:
        for cuts in combinations(range(1, layers), chunks - 1):
            if bound(cuts, limit()) < limit():
                pricing.price_cuts(cuts)
    else:
        starts = {start} if start else initial_cuts(problem)
        fitting = [cuts for cuts in sorted(starts, key=bound) if bound(cuts) < limit()]
        if fitting:
            first = min(fitting, key=lambda cuts: pricing.price_cuts(cuts, None))
            if pricing.price_cuts(first, None) < HOPELESS * ceiling:
                follow(first)
    if not few and pricing.cuts is None and math.isinf(ceiling):
        smallest = find_min_memory_division(
            problem, problem.budget * (1 + ROUNDING), problem.budget
        )
        if smallest.cuts is not None:
            follow(smallest.cuts)
    for cuts in pricing.cheapest(None):
        if bound(cuts, limit()) < limit() and pricing.price_cuts(cuts, None) < NEAR * limit():
            pricing.price_cuts(cuts)
    for cuts in pricing.cheapest(Tie.FIRST):
        if bound(cuts, limit()) < limit():
            pricing.price_cuts(cuts, Tie.LAST)
