"""The layout that needs the least memory, where none fits."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from ....models.config.options.recompute import Rule
from ....trainer.layout.cuts import Cuts, even
from ...division.bounds import least_cuts
from ...division.interleaved import least_division
from ...division.problem import Problem
from ...grid.grid import Grid, shapes
from ...grid.wanted import Wanted, matching, may_be
from ...prices.layers import Costs
from ...traces.work import RULES
from .least import floors_of

COUNTED, STATES = 12, 3
"""Most layouts that are counted, and most of them where the state of all exceeds the budget."""
BLOCKS: Sequence[Rule] = ("operator", "block")
"""Rules that are counted then: those that keep least."""
BEGINNINGS = 2_000
"""Most beginnings of an interleaved division that are tried."""


@dataclass(frozen=True)
class Nearest:
    """The layout that needs the least memory of a device."""

    bytes: int
    grid: Grid
    stage: int
    """The stage that needs most."""
    parts: Mapping[str, int]


def nearest(
    costs: Costs, gpus: int, budget: float, wanted: Wanted | None, *, by_state: bool = False
) -> Nearest:
    """Return the layout with the least bytes of those that are counted, each with one recompute
    rule for all layers.

    Layouts are counted in the order of their sums: of the state alone, if that decides (`by_state`;
    stages are then even), else with the division of the least sum. More rows of a micro-batch need
    no less, and GPipe keeps no fewer micro-batches alive than 1F1B.
    """
    if by_state:
        grids = list(_grids(costs, gpus, wanted))
        # Of states that are nearly equal, tensor ranks divide weights and activations most.
        grids.sort(key=lambda g: (round(floors_of(costs, g).mean / budget, 2), -g.layout.tp))
        layers = len(costs.trace.layers)
        every = [(grid, even(layers, grid.layout.all_chunks)) for grid in grids[:STATES]]
        return min((_counted(costs, *each, BLOCKS) for each in every), key=lambda one: one.bytes)
    queue: list[tuple[float, int, Grid, Cuts | None]] = []
    numbers, counted = count(), 0
    for grid in _grids(costs, gpus, wanted):
        bound = memory_bound(costs.problem(grid, budget))
        queue.append((bound, next(numbers), grid, None))
    heapq.heapify(queue)
    best: Nearest | None = None
    while queue and counted < COUNTED:
        bound, _, grid, cuts = heapq.heappop(queue)
        if best is not None and bound >= best.bytes:
            break
        if cuts is not None:
            counted += 1
            found = _counted(costs, grid, cuts, RULES)
            best = found if best is None or found.bytes < best.bytes else best
            continue
        problem = costs.problem(grid, budget)
        if problem.chunks > 1:
            division = least_division(problem, most=BEGINNINGS)
            least, cuts = division.bytes, division.cuts
        else:
            least, cuts = least_cuts(problem)
        if cuts is not None:
            heapq.heappush(queue, (least, next(numbers), grid, cuts))
    assert best is not None, "every number of devices has a layout"
    return best


def _grids(costs: Costs, gpus: int, wanted: Wanted | None) -> Iterator[Grid]:
    """Yield the layouts with the fewest rows of a micro-batch."""
    seen = set()
    for shape, *_ in shapes(costs.model, gpus, costs.machine.per_node, costs.phase):
        if shape is None or not may_be(shape, wanted):
            continue
        for grid in matching(costs.variants(shape, gpus), wanted):
            key = id(grid.engine), grid.layout
            asked = wanted and "schedule" in wanted
            lean = grid.layout.pipeline_schedule.may_need_least_memory or asked
            if lean and key not in seen:  # rows come in rising order
                seen.add(key)
                yield grid


def _counted(costs: Costs, grid: Grid, cuts: Cuts, rules: Sequence[Rule]) -> Nearest:
    """Return the memory of a division with the best of these rules for all layers."""
    engine, layers = grid.engine, len(costs.trace.layers)
    found = [costs.memory.timelines(grid, engine, cuts, [rule] * layers) for rule in rules]
    sizes = [[timeline.highest for timeline in each] for each in found]
    most, own = min(zip(map(max, sizes), range(len(rules)), strict=True))
    stage = sizes[own].index(most)
    return Nearest(most, grid, stage, found[own][stage].parts)


def memory_bound(problem: Problem) -> float:
    """Return bytes that the fullest stage needs at least: the mean of all stages."""
    state = sum(
        min(choice.held + choice.kept for choice in problem.sorts[sort].choices)
        for sort in problem.layers
    )
    ends = (problem.first.held, problem.last.held, *(m.held for m in problem.modules))
    return (state + sum(ends)) / problem.stages
