"""The division of the layers into stages, with the choices of each stage.

One chunk for each stage: divisions are completed stage by stage in the order of their bounds. The
choices of each stage are exact (knapsack), and the price is the simulated step. The search ends
when no bound is below the best price: then nothing is better. It also ends after `MOST` divisions
or `EVENTS` simulated passes; the solution then states the bound that is left.

Interleaved: all divisions where they are few; otherwise those that lie on a path of moves of one
layer, as the trainer's default cuts are found (trainer/pipeline/cuts.py).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from itertools import accumulate, combinations

import numpy as np

from ....pipeline.cuts import Cuts, even, neighbours
from .bounds import Bounds, quick_bound
from .knapsack import Knapsack
from .problem import Problem, Solution, StagePlan, price

EVENTS = 200_000
"""Most simulated passes of a problem: about half a second."""
LEAST, MOST = 4, 200
"""Least divisions that are priced, however many passes a step has, and most of them."""
MOVES = 4
"""Neighbours of a division of an interleaved schedule that are priced, least bound first."""
FEW = 500
"""Divisions of an interleaved schedule that are all tried."""


def solve(problem: Problem, ceiling: float = math.inf) -> Solution | None:
    """Return the best division and choices below a price; None if there are none."""
    pricing = Pricing(problem)
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

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.knapsack = Knapsack(problem)
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
    """Price all divisions if they are few, else those on paths of moves of one layer."""
    layers, chunks = len(problem.layers), problem.all_chunks
    if math.comb(layers - 1, chunks - 1) <= min(FEW, pricing.left):
        for cuts in combinations(range(1, layers), chunks - 1):
            pricing.take(cuts)
        return
    bound = DivisionBound(problem)
    for start in sorted(starts(problem), key=bound):
        if bound(start) >= min(pricing.best, ceiling):
            break
        now = pricing.take(start)
        while pricing.left > 0:
            near = sorted((bound(cuts), cuts) for cuts in neighbours(start, layers))
            best = min(
                (pricing.take(cuts), cuts)
                for at_least, cuts in [*near[:MOVES], (0.0, start)]
                if at_least < min(pricing.best, ceiling)
            )
            if best[0] >= now:
                break
            now, start = best


class DivisionBound:
    """Bound of one division of an interleaved schedule: the passes of each stage, and those of the
    chunks before its first one, without recompute."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        times = _least_times(problem)
        times[0] += problem.first.forward + problem.first.backward
        times[-1] += problem.last.forward + problem.last.backward
        self.sums = list(accumulate(times, initial=0.0))

    def __call__(self, cuts: Cuts) -> float:
        problem = self.problem
        chunks = [self.sums[end] - self.sums[first] for first, end in problem.ranges(cuts)]
        found = before = 0.0
        for stage in range(problem.stages):
            own = sum(chunks[chunk] for chunk in problem.own(stage))
            found = max(found, before + problem.micro_batches * own)
            before += chunks[stage] + 2 * problem.message
        return found


def interleaved_estimate(problem: Problem) -> float:
    """Return the bound of the divisions that the search begins with."""
    return min(map(DivisionBound(problem), starts(problem)))


def starts(problem: Problem) -> set[Cuts]:
    """Return divisions into equal numbers of layers, equal times and equal memory."""
    chunks, layers = problem.all_chunks, len(problem.layers)
    sorts = [problem.sorts[number] for number in problem.layers]
    sizes = [min(c.held + problem.stages * c.kept for c in sort.choices) for sort in sorts]
    times = _least_times(problem)
    times[-1] += problem.last.forward + problem.last.backward
    return {even(layers, chunks), balanced(times, chunks), balanced(sizes, chunks)}


def _least_times(problem: Problem) -> list[float]:
    sorts = [problem.sorts[number] for number in problem.layers]
    return [sort.forward + min(c.backward for c in sort.choices) for sort in sorts]


def balanced(costs: list[float], chunks: int) -> Cuts:
    """Return cuts where the sum of the costs passes equal parts of the total."""
    sums = list(accumulate(costs, initial=0.0))
    cuts: list[int] = []
    for chunk in range(1, chunks):
        near = bisect_left(sums, sums[-1] * chunk / chunks)
        least = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(near, least), len(costs) - (chunks - chunk)))
    return tuple(cuts)
