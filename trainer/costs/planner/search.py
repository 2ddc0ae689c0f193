"""Search of all layouts: bounds first, then the exact division of the best.

    shape     pp, cp, tp, ep, rows       bounded by the passes of all layers, shared evenly
    grid      + engine, schedule         bounded by bounds.py, without and with divisions
    plan      + cuts, choices of layers  priced by events

One queue holds all three, least bound first; what comes out is refined and put back. As soon as as
many plans as asked for are cheaper than the next bound, nothing better is left.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from ...layout.config import LayoutConfig
from ...pipeline.cuts import Cuts
from .division.bounds import Bounds, least_cuts, quick_bound, stage_alone
from .division.interleaved import NODES, fullest, interleaved_estimate, least_division
from .division.linear import ROUNDING
from .division.problem import Problem, Solution
from .division.solve import solve
from .grid import Grid, Shape, shapes, variants
from .layers import Costs

BEST = 10
"""Plans that a search returns."""
PROOF = 1_000_000
"""Most beginnings of interleaved divisions that the proof of "no plan" tries: about 15 seconds."""
MARGIN = 1e-9
"""Relative difference below which two times are equal: the simpler layout is then better."""


@dataclass(frozen=True)
class Candidate:
    """A plan of the search."""

    grid: Grid
    problem: Problem
    solution: Solution

    @property
    def memory(self) -> float:
        """Bytes of the fullest stage, without buffers."""
        return max(stage.memory for stage in self.solution.stages)


@dataclass
class Outcome:
    """Result of a search."""

    candidates: list[Candidate] = field(default_factory=list)
    """Best first."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reasons of layouts that cannot run, with their number."""
    shapes: int = 0
    grids: int = 0
    solved: int = 0
    """Grids whose divisions were searched."""
    undecided: list[Grid] = field(default_factory=list)
    """Interleaved layouts of which neither a division that fits nor the proof that none does was
    found. Filled only without candidates."""


Wanted = Mapping[str, Any]
"""Settings that a layout must have, by the names of `Grid.words`."""


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
    outside: list[Grid] = []
    """Interleaved layouts of which no division that fits was found."""
    queue: list[tuple[float, int, Callable[[], None]]] = []

    def push(bound: float, refine: Callable[[], None]) -> None:
        if bound < ceiling():
            heapq.heappush(queue, (bound, next(order), refine))

    def ceiling() -> float:
        done = outcome.candidates
        return done[best - 1].solution.price if len(done) >= best else math.inf

    def problem_of(grid: Grid) -> Problem:  # made again for each bound: thousands of them wait
        return costs.problem(grid, budget, simulate=simulate)

    def expand(shape: Shape) -> None:
        for grid, problem in problems_of(costs, shape, gpus, budget, wanted, simulate):
            outcome.grids += 1
            bound = quick_bound(problem)
            if math.isfinite(bound):
                push(bound, lambda g=grid: divide(g))  # type: ignore[misc]

    def divide(grid: Grid) -> None:
        problem = problem_of(grid)
        if problem.chunks > 1:
            bound = interleaved_estimate(problem, ceiling())
            if math.isinf(bound):
                outside.append(grid)
        else:  # the tables of bounds are large: `solve` makes them again
            bound = stage_alone(problem) if problem.stages == 1 else Bounds(problem).bound()
        if math.isfinite(bound):
            push(bound, lambda: finish(grid))

    def finish(grid: Grid) -> None:
        outcome.solved += 1
        problem = problem_of(grid)
        solution = solve(problem, ceiling())
        if solution is None and problem.chunks > 1:
            outside.append(grid)
        if solution is not None:
            outcome.candidates.append(Candidate(grid, problem, solution))
            outcome.candidates.sort(key=_rank)
            del outcome.candidates[best:]

    for shape, layout, wrong in shapes(costs.model, gpus, costs.machine.per_node, costs.phase):
        if _agrees(_settings(layout), wanted):  # reasons of layouts that are asked for
            outcome.refused.update(wrong)
        if shape is not None and _may_be(shape, wanted):
            outcome.shapes += 1
            push(shape_bound(costs, shape, simulate), lambda s=shape: expand(s))  # type: ignore[misc]
    while queue:
        bound, _, refine = heapq.heappop(queue)
        if bound >= ceiling():
            break
        refine()
    left = PROOF
    for grid in [] if outcome.candidates else list(outside):
        problem = problem_of(grid)
        least = least_division(
            problem, problem.budget * (1 + ROUNDING), problem.budget, min(left, NODES)
        )
        left -= least.nodes
        if least.cuts is not None:
            finish(grid)
        if not (outcome.candidates or (least.complete and least.cuts is None)):
            outcome.undecided.append(grid)
    return outcome


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


def problems_of(
    costs: Costs,
    shape: Shape,
    gpus: int,
    budget: float,
    wanted: Wanted | None = None,
    simulate: bool = False,
) -> Iterator[tuple[Grid, Problem]]:
    """Yield the grids of a shape with their problems. Schedules differ in nothing else."""
    plain: dict[int, Problem] = {}
    for grid in variants(shape, costs.model, gpus, costs.machine.per_node, costs.precision):
        if wanted and any(grid.words().get(name) != value for name, value in wanted.items()):
            continue
        key = id(grid.engine)
        if key not in plain:
            plain[key] = costs.problem(grid, budget, simulate=simulate)
        layout = grid.layout
        yield grid, replace(plain[key], schedule=layout.schedule, chunks=layout.chunks)


@dataclass(frozen=True)
class Nearest:
    """The layout that needs the least memory of a device."""

    bytes: float
    grid: Grid
    stage: int
    """The stage that needs most."""
    parts: Mapping[str, float]


def nearest(costs: Costs, gpus: int, budget: float, wanted: Wanted | None) -> Nearest:
    """Return the layout with the least bytes. GPipe keeps no fewer micro-batches alive than 1F1B;
    interleaved layouts are looked at last, because their divisions are many."""
    found: tuple[float, Grid, Problem, Cuts] | None = None
    interleaved: list[tuple[float, Grid]] = []
    for shape, *_ in shapes(costs.model, gpus, costs.machine.per_node, costs.phase):
        if shape is None or not _may_be(shape, wanted):
            continue
        for grid, problem in problems_of(costs, shape, gpus, budget, wanted):
            bound = memory_bound(problem, budget)
            if found is not None and bound >= found[0]:
                continue
            if problem.chunks > 1:
                interleaved.append((bound, grid))
            elif grid.layout.schedule == "1f1b" or (wanted and "schedule" in wanted):
                least, cuts = least_cuts(problem)
                least += budget - problem.budget
                if found is None or least < found[0]:
                    found = least, grid, problem, cuts
    left = PROOF
    for bound, grid in sorted(interleaved, key=lambda each: each[0]):
        if found is not None and bound >= found[0]:
            break
        problem = costs.problem(grid, budget)
        buffers = budget - problem.budget
        ceiling = math.inf if found is None else found[0] - buffers
        division = least_division(problem, ceiling, most=min(left, NODES))
        left -= division.nodes
        if division.cuts is not None:
            found = division.bytes + buffers, grid, problem, division.cuts
    assert found is not None, "every number of devices has a layout"
    least, grid, problem, cuts = found
    stage, parts = fullest(problem, cuts)
    buffers = budget - problem.budget
    return Nearest(least, grid, stage, {**parts, **({"buffers": buffers} if buffers else {})})


def memory_bound(problem: Problem, budget: float) -> float:
    """Return bytes that the fullest stage needs at least: the mean of all stages."""
    state = sum(
        min(choice.held + choice.kept for choice in problem.sorts[sort].choices)
        for sort in problem.layers
    )
    ends = (problem.first.held, problem.last.held, *(m.held for m in problem.modules))
    return (state + sum(ends)) / problem.stages + budget - problem.budget


def _may_be(shape: Shape, wanted: Wanted | None) -> bool:
    """True unless the shape contradicts what is wanted."""
    sizes = {"dp": shape.dp, "rows": shape.rows, "micro": shape.micro_batches}
    return _agrees({**_settings(shape.layout), **sizes}, wanted)


def _settings(layout: LayoutConfig) -> Wanted:
    names = ("pp", "cp", "tp", "ep", "attention", "hyena_li")
    return {name: getattr(layout, name) for name in names}


def _agrees(known: Wanted, wanted: Wanted | None) -> bool:
    return not wanted or all(known.get(name, value) == value for name, value in wanted.items())


def _rank(candidate: Candidate) -> tuple[float, ...]:
    """Order by time; of equal times the layout with smaller degrees is simpler."""
    digits = -math.floor(math.log10(candidate.solution.price * MARGIN))
    layout = candidate.grid.layout
    degrees = layout.pp, layout.chunks, layout.cp, layout.tp, layout.ep
    ring = layout.attention == "ring", layout.hyena_li == "a2a", layout.schedule != "1f1b"
    return (round(candidate.solution.price, digits), *degrees, *ring)
