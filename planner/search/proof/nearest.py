"""Find the layout with the smallest peak memory, for errors where none fits."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from ....models.config.options.recompute import Rule
from ....trainer.layout.cuts import Cuts, even_cuts
from ...division.bounds import find_min_memory_cuts
from ...division.interleaved import find_min_memory_division
from ...division.problem import Problem
from ...grid.grid import Grid, enumerate_shapes
from ...grid.settings import Settings, may_match_shape, select_grids
from ...prices.layers import Costs
from ...prices.missing import refuse_offload
from ...traces.work import RULES
from .min_memory import build_floors

MAX_LAYOUTS = 12
"""Maximum number of layouts counted."""
MAX_LAYOUTS_BY_STATE = 3
"""The maximum where the state alone decides."""
BY_STATE_RULES: Sequence[Rule] = ("operator", "block")
"""Rules counted where the state alone decides: they have the fewest activations."""
MAX_PARTIAL_DIVISIONS = 2_000
"""Maximum number of partial interleaved divisions tried."""


@dataclass(frozen=True)
class Nearest:
    """The layout with the smallest peak memory per device."""

    bytes: int
    grid: Grid
    stage: int
    """Stage with the highest peak."""
    parts: Mapping[str, int]


def find_nearest(
    costs: Costs, gpus: int, budget: float, settings: Settings | None, *, by_state: bool = False
) -> Nearest:
    """Return the counted layout with the smallest peak memory; each uses one recompute rule for all
    layers.

    Layouts are counted by rising lower bounds: by state alone, if that decides (`by_state`; stages
    are then even), else by the division that adds up to the fewest bytes. More rows per micro-batch
    need no less, and GPipe has no fewer micro-batches in flight than 1F1B.
    """
    if by_state:
        grids = list(_smallest_grids(costs, gpus, settings))
        # Where states are nearly equal, tensor ranks divide weights and activations most.
        grids.sort(key=lambda g: (round(build_floors(costs, g).mean / budget, 2), -g.layout.tp))
        num_layers = len(costs.trace.layers)
        layouts = (
            _count_memory(
                costs, grid, even_cuts(num_layers, grid.layout.all_chunks), BY_STATE_RULES
            )
            for grid in grids[:MAX_LAYOUTS_BY_STATE]
        )
        return min(layouts, key=lambda layout: layout.bytes)
    queue: list[tuple[float, int, Grid, Cuts | None]] = []
    arrivals, num_counted = count(), 0
    for grid in _smallest_grids(costs, gpus, settings):
        bound = memory_bound(costs.problem(grid, budget))
        queue.append((bound, next(arrivals), grid, None))
    heapq.heapify(queue)
    best: Nearest | None = None
    while queue and num_counted < MAX_LAYOUTS:
        bound, _, grid, cuts = heapq.heappop(queue)
        if best is not None and bound >= best.bytes:
            break
        if cuts is not None:
            num_counted += 1
            layout = _count_memory(costs, grid, cuts, RULES)
            best = layout if best is None or layout.bytes < best.bytes else best
            continue
        problem = costs.problem(grid, budget)
        if problem.chunks > 1:
            division = find_min_memory_division(problem, max_nodes=MAX_PARTIAL_DIVISIONS)
            bound, cuts = division.bytes, division.cuts
        else:
            bound, cuts = find_min_memory_cuts(problem)
        if cuts is not None:
            heapq.heappush(queue, (bound, next(arrivals), grid, cuts))
    assert best is not None, "every number of devices has a layout"
    return best


def _smallest_grids(costs: Costs, gpus: int, settings: Settings | None) -> Iterator[Grid]:
    """Yield every layout once, with the fewest rows per micro-batch."""
    seen = set()
    for shape, *_ in enumerate_shapes(costs.model, gpus, costs.machine.per_node, costs.phase):
        if shape is None or not may_match_shape(shape, settings):
            continue
        offloads = (False, True) if refuse_offload(costs) is None else (False,)
        grids = (grid for offload in offloads for grid in costs.grids(shape, gpus, offload=offload))
        for grid in select_grids(grids, settings):
            key = id(grid.engine), grid.layout
            is_requested = settings and "schedule" in settings
            may_be_nearest = grid.layout.pipeline_schedule.can_save_memory or is_requested
            if may_be_nearest and key not in seen:  # rows come in rising order
                seen.add(key)
                yield grid


def _count_memory(costs: Costs, grid: Grid, cuts: Cuts, rules: Sequence[Rule]) -> Nearest:
    """Return a division's memory with the best single rule for all layers."""
    engine, num_layers = grid.engine, len(costs.trace.layers)
    timelines_by_rule = [
        costs.memory.timelines(grid, engine, cuts, [rule] * num_layers) for rule in rules
    ]
    peaks_by_rule = [[t.highest for t in timelines] for timelines in timelines_by_rule]
    peak, rule_index = min(zip(map(max, peaks_by_rule), range(len(rules)), strict=True))
    stage = peaks_by_rule[rule_index].index(peak)
    return Nearest(peak, grid, stage, timelines_by_rule[rule_index][stage].parts)


def memory_bound(problem: Problem) -> float:
    """Return a lower bound on the fullest stage's bytes: the mean over stages."""
    state = sum(
        min(choice.state + choice.activations for choice in problem.kinds[kind].choices)
        for kind in problem.layers
    )
    ends = (problem.first.state, problem.last.state, *(m.state for m in problem.modules))
    return (state + sum(ends)) / problem.stages
