"""Improve a plan's choices for single layers, by the step's timeline.

A search adds up the bytes in a stage's layers, plus their largest workspace. The timeline also
knows a layer's position. The last layer runs its backward pass first: its recomputed results are
alive at the peak in any case, so keeping them may cost nothing. Single layers, and pairs, take
faster choices as long as the plan still fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from ...models.accounting.step import Timeline
from ...trainer.layout.cuts import Cuts
from ..division.pricing import price_division
from ..division.problem import Choice, Problem, StagePlan
from ..grid.grid import Grid
from ..prices.layers import Costs

COUNTED_LAYERS = 150
"""Maximum number of layers in all timelines counted for a plan: 30 timelines for 5 layers, 3 for
50."""


class PricedPlan(NamedTuple):
    """A choice for every layer, with the step's seconds and memory."""

    price: float
    stages: tuple[StagePlan, ...]
    choices: Sequence[Choice]
    timelines: Sequence[Timeline]


class Move(NamedTuple):
    """New choices for one or two layers."""

    saved_seconds: float
    """Seconds by which a backward pass gets shorter."""
    added_bytes: float
    """Additional activation bytes per micro-batch."""
    choices: dict[int, Choice]
    """New choices by layer."""


def exchange_choices(
    costs: Costs, grid: Grid, problem: Problem, cuts: Cuts, plan: PricedPlan
) -> PricedPlan:
    """Improve a plan greedily: take the first move that shortens the step and fits, then begin
    again from the result."""
    num_timelines = COUNTED_LAYERS // len(problem.layers)
    neighbours = _enumerate_neighbours(problem, cuts, plan)
    while num_timelines and (choices := next(neighbours, None)) is not None:
        division = price_division(problem, cuts, choices)
        if division.price >= plan.price:
            continue
        num_timelines -= 1
        timelines = costs.timelines(grid, cuts, [choice.name for choice in choices])
        if max(timeline.highest for timeline in timelines) <= problem.budget:
            plan = PricedPlan(division.price, division.stages, choices, timelines)
            neighbours = _enumerate_neighbours(problem, cuts, plan)
    return plan


def _enumerate_neighbours(
    problem: Problem, cuts: Cuts, plan: PricedPlan
) -> Iterator[Sequence[Choice]]:
    """Yield the choices after a move by a single layer, fastest first, then after moves by two
    layers that exchange memory."""
    identical_layers: defaultdict[Hashable, list[int]] = defaultdict(list)
    for chunk, (begin, end) in enumerate(problem.ranges(cuts)):
        for layer in range(begin, end):
            key = chunk, problem.layers[layer], plan.choices[layer].name.key
            identical_layers[key].append(layer)
    # Among identical layers in a chunk with the same choice, only the first and the last change.
    ends = {layer for layers in identical_layers.values() for layer in (layers[0], layers[-1])}
    single_moves = [
        Move(old.backward - new.backward, new.activations - old.activations, {layer: new})
        for layer in sorted(ends)
        for old in [plan.choices[layer]]
        for new in problem.kinds[problem.layers[layer]].choices
        if new is not old
    ]
    yield from _apply_fastest_first(plan, single_moves)
    for stage, timeline in enumerate(plan.timelines):
        free = problem.budget - timeline.highest
        ranges = [problem.ranges(cuts)[chunk] for chunk in problem.stage_chunks(stage)]
        stage_layers = {layer for begin, end in ranges for layer in range(begin, end)}
        stage_moves = [move for move in single_moves if stage_layers.issuperset(move.choices)]
        pairs = [
            _combine_moves(first, second)
            for first, second in combinations(stage_moves, 2)
            if first.choices.keys() != second.choices.keys()
            and first.added_bytes + second.added_bytes <= free
        ]
        yield from _apply_fastest_first(plan, pairs)


def _combine_moves(first: Move, second: Move) -> Move:
    return Move(
        first.saved_seconds + second.saved_seconds,
        first.added_bytes + second.added_bytes,
        {**first.choices, **second.choices},
    )


def _apply_fastest_first(plan: PricedPlan, moves: Iterable[Move]) -> Iterator[Sequence[Choice]]:
    useful = [move for move in moves if move.saved_seconds > 0]
    for move in sorted(useful, key=lambda m: (m.saved_seconds, *m.choices), reverse=True):
        yield [move.choices.get(layer, old) for layer, old in enumerate(plan.choices)]
