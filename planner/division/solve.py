"""Divide the layers into chunks, with choices for every layer.

1. A dynamic program over layers and chunks finds cuts whose slowest stage is fastest, by the times
   of linear programming (program.py). It sees a stage as if all its chunks were alike: that is
   exact for one chunk per stage.
2. The stages choose whole layers (choices.py), and the step is simulated.
3. While the step is more than TOLERANCE above the bound, layers move: the slowest stage gives one
   to another, and all chunks between them shift by one.

Bytes beyond the budget cost more seconds than any step. So where nothing fits, the same search
finds the division with the smallest excess.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from ...trainer.layout.cuts import Cuts
from .bounds import quick_bound
from .choices import EXCESSIVE, Relaxation, price_overflow
from .problem import Choice, Problem, Solution, StagePlan, cost_stage, price, price_division
from .program import Start, balance_bytes, balance_seconds, find_cuts, sum_fastest

TOLERANCE = 3e-3
"""Part of the price by which a solution may be above the bound."""
EVENTS = 200_000
"""Maximum number of simulated passes per problem: about half a second."""
MIN_PRICED, MAX_PRICED = 4, 200
"""Minimum and maximum number of divisions priced, whatever the passes per step."""
FEW = 600
"""Maximum number of divisions into several chunks per stage that are all tried."""
MOVES = 20
"""Moves that are priced before the best of them is made, lowest estimate first."""
GIVERS = 2
"""Slowest chunks of the slowest stage that may give a layer to any chunk."""
RECEIVERS = 4
"""Fastest stages whose fastest chunk may receive it."""


class PricedCuts(NamedTuple):
    """Cuts with their stages' plans."""

    score: float
    """The price, with the seconds of all excess."""
    cuts: Cuts
    stages: tuple[StagePlan, ...]


def solve(
    problem: Problem, ceiling: float = math.inf, start: Start | None = None
) -> Solution | None:
    """Return a division below the price `ceiling` and within TOLERANCE of the best; None if there
    is none. If nothing fits, its stages exceed their budgets."""
    divisions = Divisions(problem)
    starts = divisions.list_starts(start or divisions.find_start())
    if starts[0].estimate >= ceiling:
        return None
    bound = quick_bound(problem) if problem.chunks > 1 else starts[0].estimate
    best = divisions.descend(divisions.price_starts(starts), bound, ceiling)
    for _, cuts in starts[:3] if best.score >= EXCESSIVE else ():
        best = min(best, divisions.descend(divisions.price(cuts), bound, ceiling), key=_score)
    if best.score >= ceiling:
        return None
    choices = assign_choices(problem, best)
    return price_division(problem, best.cuts, choices).bounded(bound)


class Divisions:
    """A problem's divisions, with the plans of their stages."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._counts: list[list[int]] = problem.counts.tolist()
        self._relaxations: dict[tuple[float, ...], Relaxation] = {}
        self._plans: dict[tuple[object, ...], tuple[StagePlan, ...]] = {}
        self._priced: dict[Cuts, PricedCuts] = {}
        passes = 2 * problem.micro_batches * problem.all_chunks
        self._max_priced = min(MAX_PRICED, max(MIN_PRICED, EVENTS // passes))

    def find_start(self) -> Start:
        """Return cuts with an estimate: those of the dynamic program, or with several chunks cuts
        into equal times, which take no program."""
        if self.problem.chunks > 1:
            cuts = balance_seconds(self.problem)
            return Start(self.estimate(cuts), cuts)
        start = find_cuts(self.problem, self.relax)
        if start.estimate >= EXCESSIVE:
            return Start(self.estimate(start.cuts), start.cuts)
        return start

    def list_starts(self, start: Start) -> list[Start]:
        """Return the starts that are priced, lowest estimate first. With several chunks, the cuts
        of the program are another start, and all cuts are, if they are few."""
        layers, chunks = len(self.problem.layers), self.problem.all_chunks
        if self.problem.chunks == 1:
            return [start]
        starts = {start.cuts, balance_bytes(self.problem), find_cuts(self.problem, self.relax).cuts}
        if math.comb(layers - 1, chunks - 1) <= FEW:
            starts = {*combinations(range(1, layers), chunks - 1)}
        return sorted(Start(self.estimate(cuts), cuts) for cuts in starts)

    def relax(self, in_flight: Sequence[float]) -> Relaxation:
        """Return the linear programs for micro-batches in flight."""
        key = tuple(in_flight)
        if key not in self._relaxations:
            self._relaxations[key] = Relaxation(self.problem, in_flight)
        return self._relaxations[key]

    def plan_stages(self, cuts: Cuts, *, exact: bool = True) -> list[tuple[StagePlan, ...]]:
        """Return the plans of every stage. Of several chunks, the first one has the fastest choices
        in one plan, and the last one in another. Without `exact`, choices are those of linear
        programming in whole layers."""
        counts = [
            tuple(
                after - before
                for before, after in zip(self._counts[first], self._counts[end], strict=True)
            )
            for first, end in self.problem.ranges(cuts)
        ]
        plans = []
        for stage in range(self.problem.stages):
            key = stage, exact, tuple(counts[stage :: self.problem.stages])
            if key not in self._plans:
                self._plans[key] = tuple(self._plan_stage(*key))
            plans.append(self._plans[key])
        return plans

    def _plan_stage(
        self, stage: int, exact: bool, counts: Sequence[Sequence[int]]
    ) -> Iterator[StagePlan]:
        """Choose for a stage's layers: `counts` by chunk and kind."""
        problem, in_flight = self.problem, self.problem.in_flight(stage)
        relaxation = self.relax(in_flight)
        layers = dict.fromkeys(relaxation.columns, 0)
        for n, by_kind in zip(in_flight, counts, strict=True):
            for number, count in enumerate(by_kind):
                layers[number, n] += count
        called = [problem.all_kinds[kind] for (kind, _), count in layers.items() if count]
        budget = problem.stage_budget(stage)
        budget -= sum(module.state for module in problem.called_modules(called))
        numbers = relaxation.choose(np.array([*layers.values()]), budget, exact=exact)
        queues = {}
        for column, choices, by_choice in zip(
            relaxation.columns, relaxation.choices, numbers, strict=True
        ):
            chosen = [c for c, n in zip(choices, by_choice, strict=True) for _ in range(n)]
            queues[column] = sorted(chosen, key=lambda choice: -choice.backward)
        for step in (1, -1)[: problem.chunks if exact else 1]:
            remaining = {column: [*queue] for column, queue in queues.items()}
            chunks: list[tuple[tuple[Choice, ...], ...]] = [
                tuple(
                    tuple(remaining[kind, n].pop() for _ in range(count))
                    for kind, count in enumerate(by_kind[: len(problem.kinds)])
                )
                for n, by_kind in [*zip(in_flight, counts, strict=True)][::step]
            ][::step]
            pairs = [
                [
                    (kind, c)
                    for kind, taken in zip(problem.kinds, by_kind, strict=True)
                    for c in taken
                ]
                for by_kind in chunks
            ]
            yield replace(cost_stage(problem, stage, pairs), choices=tuple(chunks))

    def estimate(self, cuts: Cuts) -> float:
        """Estimate the step from the stages' seconds, without their waits, and with those of all
        excess."""
        stages = [plans[0] for plans in self.plan_stages(cuts, exact=False)]
        step = self._add_stages([plan.passes for plan in stages])
        return step + sum(self._price_excess(stages))

    def estimate_fastest(self, cuts: Cuts) -> float:
        """Estimate the step if memory were unlimited."""
        sums = sum_fastest(self.problem).tolist()
        chunks = [sums[first] - sums[end] for first, end in self.problem.ranges(cuts)]
        stages = self.problem.stages
        return self._add_stages([chunks[stage::stages] for stage in range(stages)])

    def _add_stages(self, passes: Sequence[Sequence[float]]) -> float:
        """Estimate the step from the seconds of both passes, by stage and chunk."""
        step = before = 0.0
        for chunks in passes:
            step = max(step, before + self.problem.micro_batches * sum(chunks))
            before += chunks[0] + 2 * self.problem.message
        return step

    def _price_excess(self, stages: Sequence[StagePlan]) -> list[float]:
        """Return the seconds that each stage's bytes beyond its budget cost."""
        problem = self.problem
        excess = (plan.memory - problem.stage_budget(n) for n, plan in enumerate(stages))
        return [price_overflow(problem, size) for size in excess]

    def price(self, cuts: Cuts) -> PricedCuts:
        """Simulate a division, with several chunks in two ways."""
        if cuts not in self._priced:
            divisions = [
                PricedCuts(
                    price(self.problem, stages) + sum(self._price_excess(stages)), cuts, stages
                )
                for stages in zip(*self.plan_stages(cuts), strict=True)
            ]
            self._priced[cuts] = min(divisions, key=_score)
        return self._priced[cuts]

    def price_starts(self, starts: Sequence[Start]) -> PricedCuts:
        """Return the best of the starts."""
        best = self.price(starts[0].cuts)
        for estimate, cuts in starts[1 : self._max_priced]:
            if estimate < best.score:
                best = min(best, self.price(cuts), key=_score)
        return best

    def descend(self, best: PricedCuts, bound: float, ceiling: float) -> PricedCuts:
        """Move layers out of the slowest stage while the step gets shorter."""
        while best.score > bound * (1 + TOLERANCE) and len(self._priced) < self._max_priced:
            limit = min(best.score, ceiling)
            moves = sorted((self.estimate(cuts), cuts) for cuts in self._moves(best))
            divisions = [self.price(cuts) for estimate, cuts in moves[:MOVES] if estimate < limit]
            if not divisions or (next_best := min(divisions, key=_score)).score >= best.score:
                break
            best = next_best
        return best

    def _moves(self, division: PricedCuts) -> Iterator[Cuts]:
        """Yield the cuts after a chunk has given a layer to another, and all chunks between them
        have shifted: the slowest chunks of the slowest stage to a neighbour, and to the fastest of
        fast stages; any chunk to a neighbour, if stages have one chunk or bytes exceed the budget.
        Then the slowest stage is the one with the largest excess, and its slowest chunks have most
        micro-batches in flight."""
        problem, cuts, stages = self.problem, division.cuts, division.stages
        excess = self._price_excess(stages)

        def sort_chunks(stage: int) -> list[int]:
            """Return a stage's chunks, the fastest first."""
            plan = stages[stage]
            in_flight = problem.in_flight(stage) if any(excess) else (0,) * problem.chunks
            weights = [*zip(in_flight, plan.passes, strict=True)]
            return sorted(problem.stage_chunks(stage), key=lambda n: weights[n // problem.stages])

        seconds = [plan.seconds + penalty for plan, penalty in zip(stages, excess, strict=True)]
        by_time = sorted(range(problem.stages), key=seconds.__getitem__)
        large = [n for n, (begin, end) in enumerate(problem.ranges(cuts)) if end - begin > 1]
        givers = [n for n in sort_chunks(by_time[-1]) if n in large][-GIVERS:]
        receivers = [sort_chunks(stage)[0] for stage in (*by_time[:RECEIVERS], by_time[-1])]
        shifting = large if problem.chunks == 1 or any(excess) else givers
        pairs = {*product(givers, receivers)} | {
            (n, n + step) for n in shifting for step in (-1, 1)
        }
        for giver, receiver in pairs:
            if giver != receiver and 0 <= receiver < problem.all_chunks:
                first, last = sorted((giver, receiver))
                shift = -1 if giver < receiver else 1
                yield (*cuts[:first], *(cut + shift for cut in cuts[first:last]), *cuts[last:])


def _score(division: PricedCuts) -> float:
    return division.score


def assign_choices(problem: Problem, division: PricedCuts) -> list[Choice]:
    """Return a choice for every layer.

    Among identical layers, the largest workspaces go first: later layers run their backward pass,
    and free memory, before them.
    """
    choices = []
    for chunk, (first, end) in enumerate(problem.ranges(division.cuts)):
        by_kind = division.stages[chunk % problem.stages].choices[chunk // problem.stages]
        queues = [sorted(taken, key=lambda choice: choice.workspace) for taken in by_kind]
        choices += [queues[kind].pop() for kind in problem.layers[first:end]]
    return choices
