"""Divide the layers into chunks, with choices for every layer.

1. A dynamic program over layers and chunks finds cuts whose slowest stage is fastest, by the times
   of linear programming (choices.py). It sees a stage as if all its chunks were alike: that is
   exact for one chunk per stage.
2. The stages choose whole layers, and the step is simulated. With one chunk per stage, the program
   runs again with the times of these whole layers, until it returns to cuts that are priced.
3. While the step is more than TOLERANCE above the bound, layers move: the slowest stage gives one
   to another, and all chunks between them shift by one.

Bytes beyond the budget cost more seconds than any step. So where nothing fits, the same search
finds the division with the smallest excess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from ...trainer.layout.cuts import Cuts
from .bounds import quick_bound
from .choices import EXCESSIVE, price_overflow
from .problem import Problem, Solution, StagePlan, price
from .program import Program, Start
from .stages import Stages

TOLERANCE = 3e-3
"""Part of the price by which a solution may be above the bound."""
EVENTS = 200_000
"""Maximum number of simulated passes per problem: about half a second."""
MIN_PRICED, MAX_PRICED = 4, 200
"""Minimum and maximum number of divisions priced, whatever the passes per step."""
FEW = 600
"""Maximum number of divisions into several chunks per stage that are all tried."""
MOVES = 8
"""Moves that are priced before the best of them is made, lowest estimate first."""
GIVERS = 2
"""Slowest chunks of the slowest stage that may give a layer."""
RECEIVERS = 4
"""Fastest stages whose fastest chunk may receive it, beside the neighbours."""


class Division(NamedTuple):
    """Cuts with their stages' plans."""

    score: float
    """The price, with the seconds of all excess."""
    cuts: Cuts
    stages: tuple[StagePlan, ...]


def solve(
    problem: Problem, ceiling: float = math.inf, start: Start | None = None
) -> Solution | None:
    """Return a division and choices below the price `ceiling` and within TOLERANCE of the best;
    None if there are none. If nothing fits, its stages exceed their budgets."""
    divisions = Divisions(problem)
    starts = divisions.list_starts(start or divisions.find_start())
    if starts[0].estimate >= ceiling:
        return None
    bound = quick_bound(problem) if problem.chunks > 1 else starts[0].estimate
    best = divisions.price_starts(starts, ceiling)
    best = divisions.descend(best, bound, ceiling)
    if best.score >= ceiling:
        return None
    seconds = price(problem, best.stages)
    return Solution(seconds, best.cuts, best.stages, min(bound, seconds))


class Divisions:
    """A problem's divisions, with the plans of their stages."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stages = Stages(problem)
        self.program = Program(self.stages)
        self._priced: dict[Cuts, Division] = {}
        passes = 2 * problem.micro_batches * problem.all_chunks
        self._max_priced = min(MAX_PRICED, max(MIN_PRICED, EVENTS // passes))

    def find_start(self) -> Start:
        """Return cuts with an estimate: those of the dynamic program, or with several chunks cuts
        into equal times, which take no program."""
        if self.problem.chunks > 1:
            cuts = self.program.balance_cuts()
            return Start(self.estimate(cuts), cuts)
        start = self.program.run()
        if start.estimate >= EXCESSIVE:
            return Start(self.estimate(start.cuts), start.cuts)
        return start

    def list_starts(self, start: Start) -> list[Start]:
        """Return the starts that are priced, lowest estimate first. With several chunks, the cuts
        of the program are another start, and all cuts are, if they are few."""
        layers, chunks = len(self.problem.layers), self.problem.all_chunks
        if self.problem.chunks == 1:
            return [start]
        starts = {start.cuts, self.program.run().cuts}
        if math.comb(layers - 1, chunks - 1) <= FEW:
            starts = {*combinations(range(1, layers), chunks - 1)}
        return sorted(Start(self.estimate(cuts), cuts) for cuts in starts)

    def estimate(self, cuts: Cuts) -> float:
        """Estimate the step from the stages' seconds, without their waits, and with the seconds of
        the largest excess."""
        problem, stages = self.problem, self.stages.plans(cuts, exact=False)
        step = before = 0.0
        for plan in stages:
            step = max(step, before + problem.micro_batches * plan.seconds)
            before += plan.forward[0] + plan.backward[0] + 2 * problem.message
        return step + max(self._price_excess(stages))

    def _price_excess(self, stages: Sequence[StagePlan]) -> list[float]:
        """Return the seconds that each stage's bytes beyond its budget cost."""
        problem = self.problem
        excess = (plan.memory - problem.stage_budget(n) for n, plan in enumerate(stages))
        return [price_overflow(problem, size) for size in excess]

    def price(self, cuts: Cuts) -> Division:
        """Simulate a division; with several chunks, also with fast passes in the last."""
        if cuts not in self._priced:
            plans = [self.stages.plans(cuts)]
            if self.problem.chunks > 1 and (last := self.stages.plans(cuts, last=True)) != plans[0]:
                plans.append(last)
            divisions = [
                Division(
                    price(self.problem, stages) + sum(self._price_excess(stages)), cuts, stages
                )
                for stages in plans
            ]
            self._priced[cuts] = min(divisions, key=_score)
        return self._priced[cuts]

    def price_starts(self, starts: Sequence[Start], ceiling: float) -> Division:
        """Return the best of the starts. With one chunk per stage, run the program again with the
        times of whole layers for its last cuts, until it returns to cuts that are priced."""
        best = self.price(starts[0].cuts)
        for estimate, cuts in starts[1 : self._max_priced]:
            if estimate < best.score:
                best = min(best, self.price(cuts), key=_score)
        last = best
        while self.problem.chunks == 1 and len(self._priced) < self._max_priced:
            self.program.use_whole_layers(last.cuts, last.stages)
            start = self.program.run()
            if start.cuts in self._priced or start.estimate >= min(ceiling, best.score):
                break
            last = self.price(start.cuts)
            best = min(best, last, key=_score)
        return best

    def descend(self, best: Division, bound: float, ceiling: float) -> Division:
        """Move layers out of the slowest stage while the step gets shorter."""
        while best.score > bound * (1 + TOLERANCE) and len(self._priced) < self._max_priced:
            limit = min(best.score, ceiling)
            moves = sorted((self.estimate(cuts), cuts) for cuts in self._moves(best))
            divisions = [self.price(cuts) for estimate, cuts in moves[:MOVES] if estimate < limit]
            if not divisions or (next_best := min(divisions, key=_score)).score >= best.score:
                break
            best = next_best
        return best

    def _moves(self, division: Division) -> Iterator[Cuts]:
        """Yield the cuts after the slowest stage, or the one with the largest excess, has given a
        layer to another."""
        problem, cuts = self.problem, division.cuts
        excess = self._price_excess(division.stages)
        seconds = [
            plan.seconds + penalty for plan, penalty in zip(division.stages, excess, strict=True)
        ]
        by_time = sorted(range(problem.stages), key=seconds.__getitem__)

        def sort_chunks(stage: int) -> list[int]:
            """Return a stage's chunks, the fastest first."""
            plan = division.stages[stage]
            times = [f + b for f, b in zip(plan.forward, plan.backward, strict=True)]
            return sorted(problem.stage_chunks(stage), key=lambda n: times[n // problem.stages])

        ranges = problem.ranges(cuts)
        givers = [n for n in sort_chunks(by_time[-1]) if ranges[n][1] - ranges[n][0] > 1]
        fastest = {sort_chunks(stage)[0] for stage in by_time[:RECEIVERS]}
        for giver in givers[-GIVERS:]:
            neighbours = {giver - 1, giver + 1} & {*range(problem.all_chunks)}
            for receiver in (fastest | neighbours) - {giver}:
                first, end = sorted((giver, receiver))
                shift = -1 if giver < receiver else 1
                yield (*cuts[:first], *(cut + shift for cut in cuts[first:end]), *cuts[end:])


def _score(division: Division) -> float:
    return division.score
