"""Search of all layouts: bounds first, then the exact division of the best.

    shape     pp, cp, tp, ep, rows       bounded by the passes of all layers, shared evenly
    grid      + engine, schedule         bounded by bounds.py: by the fastest choices, within the
                                         memory, and with divisions
    plan      + cuts, choices of layers  priced by events

One queue holds all three, least bound first; what comes out is refined and put back. As soon as as
many plans as asked for are cheaper than the next bound, nothing better is left.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

from ...models.accounting.step import Timeline
from ...trainer.layout.schedules import SCHEDULES
from ..division.assigned import assigned
from ..division.bounds import Bounds, fastest_bound, quick_bound, stage_alone
from ..division.fit import fit
from ..division.interleaved import interleaved_estimate
from ..division.problem import Problem, Solution
from ..grid.grid import Grid, Shape, shapes
from ..grid.wanted import Wanted, matching, may_agree, may_be
from ..prices.layers import Costs, gradients_before_the_end
from .exchange import Plan, exchanged
from .outcome import Candidate, Outcome, choices_of
from .proof.least import LeastPlan, floors_of, prove

BEST = 10
"""Plans that a search returns."""
MARGIN = 1e-9
"""Relative difference below which two times are equal: the simpler layout is then better."""


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause the collection of garbage in cycles. A search makes millions of objects that are in no
    cycle, and each collection would visit all that live."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collection()
def search(
    costs: Costs,
    gpus: int,
    budget: float,
    *,
    wanted: Wanted | None = None,
    best: int = BEST,
    simulate: bool = False,
) -> Outcome:
    """Return the best plans within `budget` bytes of each device."""
    outcome, order = Outcome(), count()
    left: list[Grid] = []
    """Layouts whose state does not exceed the budget."""
    states: dict[tuple[object, ...], bool] = {}
    problems: dict[tuple[int, int, bool], Problem] = {}
    queue: list[tuple[float, int, Callable[[], None]]] = []

    def push(bound: float, refine: Callable[[], None]) -> None:
        if bound < ceiling():
            heapq.heappush(queue, (bound, next(order), refine))

    def ceiling() -> float:
        done = outcome.candidates
        return done[best - 1].solution.price if len(done) >= best else math.inf

    def problem_of(grid: Grid) -> Problem:
        """Return the problem of a layout in `left`. Schedules that are alike in their gradients
        differ in nothing else."""
        key = id(grid.shape), id(grid.engine), gradients_before_the_end(grid)
        if key not in problems:
            problems[key] = costs.problem(grid, budget, simulate=simulate)
        return scheduled(problems[key], grid)

    def may_fit(grid: Grid) -> bool:
        """Return False if the state alone exceeds the budget."""
        layout, shape = grid.layout, grid.shape
        degrees = layout.pp, layout.chunks, shape.dp, layout.cp, layout.tp, layout.ep
        key = id(grid.engine), *degrees, shape.micro_batches > 1
        if key not in states:
            states[key] = simulate or floors_of(costs, grid).may_fit(budget)
        outcome.states += not states[key]
        return states[key]

    def expand(shape: Shape) -> None:
        fastest: dict[int, Problem] = {}  # schedules differ in nothing else
        for grid in matching(costs.variants(shape, gpus), wanted):
            outcome.grids += 1
            key = id(grid.engine)
            if key not in fastest:
                fastest[key] = costs.fastest(grid, simulate=simulate)
            bound = fastest_bound(scheduled(fastest[key], grid))
            push(bound, partial(fill, grid, bound))

    def fill(grid: Grid, least: float) -> None:
        if not may_fit(grid):
            return
        left.append(grid)
        problem = problem_of(grid)
        bound = quick_bound(problem)
        if bound <= least:  # the memory is no limit: nothing in the queue comes before
            divide(grid, problem)
        elif math.isfinite(bound):
            push(bound, lambda: divide(grid, problem_of(grid)))

    def divide(grid: Grid, problem: Problem) -> None:
        if problem.chunks > 1:
            bound = interleaved_estimate(problem, ceiling())
        else:  # the tables of bounds are large: `solve` makes them again
            bound = stage_alone(problem) if problem.stages == 1 else Bounds(problem).bound()
        if math.isfinite(bound):
            push(bound, lambda: finish(grid))

    def finish(grid: Grid) -> None:
        outcome.solved += 1
        problems.clear()  # layouts become exact
        found = fitted(costs, grid, budget, ceiling(), simulate=simulate)
        if found is not None:
            add(found)

    def add(found: Candidate) -> None:
        outcome.candidates.append(found)
        outcome.candidates.sort(key=_rank)
        del outcome.candidates[best:]

    for shape, layout, wrong in shapes(costs.model, gpus, costs.machine.per_node, costs.phase):
        if may_agree(layout, wanted):  # reasons of layouts that are asked for
            outcome.refused.update(wrong)
        if shape is not None and may_be(shape, wanted):
            outcome.shapes += 1
            push(shape_bound(costs, shape, simulate), partial(expand, shape))
    while queue:
        bound, _, refine = heapq.heappop(queue)
        if bound >= ceiling():
            break
        refine()
    if not outcome.candidates:
        proof = prove(costs, left, budget)
        for grid, plan in proof.plans:
            add(of_plan(costs, grid, plan, budget))
        if not outcome.candidates:
            outcome.undecided = [*proof.undecided]
            if simulate:  # tensor ranks that work as context ranks are not in the proof
                outcome.undecided += [grid for grid in left if grid.layout.tp > 1]
    outcome.candidates = sorted((improved(costs, each) for each in outcome.candidates), key=_rank)
    return outcome


def improved(costs: Costs, found: Candidate) -> Candidate:
    """Return a plan with better choices of single layers, by its timelines."""
    grid, problem, solution = found.grid, found.problem, found.solution
    own = Plan(solution.price, solution.stages, found.choices, found.timelines)
    plan = exchanged(costs, grid, problem, solution.cuts, own)
    bound = min(solution.bound, plan.price)
    better = replace(solution, price=plan.price, stages=plan.stages, bound=bound)
    return Candidate(grid, problem, better, plan.timelines, plan.choices)


def fitted(
    costs: Costs, grid: Grid, budget: float, ceiling: float = math.inf, *, simulate: bool = False
) -> Candidate | None:
    """Return the best plan of a grid that fits by the timelines of its stages."""

    def problem_of() -> Problem:
        return costs.problem(grid, budget, simulate=simulate)

    def count(solution: Solution) -> Sequence[Timeline] | None:
        ways = [choice.name for choice in choices_of(problem_of(), solution)]
        if costs.refine(grid, ways):
            return None
        return costs.timelines(grid, solution.cuts, ways)

    key = grid.layout.pp, grid.layout.tp, grid.layout.schedule, grid.layout.chunks, id(grid.engine)
    found = fit(problem_of, count, ceiling, costs.beyond.get(key, ()))
    if found is None:
        return None
    costs.beyond[key] = found.beyond
    return Candidate(grid, problem_of(), found.solution, found.counted)


def of_plan(costs: Costs, grid: Grid, plan: LeastPlan, budget: float) -> Candidate:
    """Return a plan that was found by its timelines, priced."""
    problem = costs.problem(grid, budget, all_choices=True)
    named = [
        {choice.name.key: choice for choice in problem.sorts[sort].choices}
        for sort in problem.layers
    ]
    choices = [own[rule, None, False] for own, rule in zip(named, plan.rules, strict=True)]
    made = assigned(problem, plan.cuts, choices)
    timelines = costs.timelines(grid, plan.cuts, [choice.name for choice in choices])
    solution = Solution(
        made.price, plan.cuts, made.stages, quick_bound(replace(problem, budget=math.inf))
    )
    return Candidate(grid, problem, solution, timelines, choices)


def scheduled(problem: Problem, grid: Grid) -> Problem:
    """Return the problem with the schedule of a grid."""
    return replace(problem, schedule=grid.layout.pipeline_schedule, chunks=grid.layout.chunks)


def shape_bound(costs: Costs, shape: Shape, simulate: bool = False) -> float:
    """Return the seconds of all passes of a step, shared evenly by the stages."""
    split = shape.split
    passes, head = costs.passes(split, shape.layout.ep)
    each = [cost.ahead + cost.back for cost in passes]
    if simulate:  # the tensor ranks of a layer may work as context ranks
        others, _ = costs.passes(replace(split, tp=1, cp=split.ranks), shape.layout.ep)
        beside = [cost.ahead + cost.back for cost in others]
        each = [min(pair) for pair in zip(each, beside, strict=True)]
    total = sum(each[sort] for sort in costs.trace.layers) + head.ahead + head.back
    return shape.micro_batches * total / shape.layout.pp


def _rank(candidate: Candidate) -> tuple[float, ...]:
    """Order by time; of equal times the layout with smaller degrees is simpler."""
    digits = -math.floor(math.log10(candidate.solution.price * MARGIN))
    layout = candidate.grid.layout
    degrees = layout.pp, layout.chunks, layout.cp, layout.tp, layout.ep
    ring = layout.attention == "ring", layout.hyena_li == "a2a"
    schedule = [*SCHEDULES].index(layout.schedule)
    return (round(candidate.solution.price, digits), *degrees, *ring, schedule)
