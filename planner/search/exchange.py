"""Better choices of single layers, by the timeline of a step.

A search adds up the bytes of a stage's layers, and counts the layer that works with most beside all
that they keep. The timeline also knows where a layer is. The last layer works first: its recomputed
results live beside everything else in any case, and to keep them may cost nothing. So single layers
of a plan, and pairs of them, take faster choices as long as the plan still fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from ...models.accounting.step import Timeline
from ...trainer.layout.cuts import Cuts
from ..division.assigned import assigned
from ..division.problem import Choice, Problem, StagePlan
from ..grid.grid import Grid
from ..prices.layers import Costs

COUNTED_LAYERS = 150
"""Layers of all timelines that are counted for a plan: 30 timelines of 5 layers, 3 of 50."""


class Plan(NamedTuple):
    """A choice for each layer, with the seconds and the memory of the step."""

    price: float
    stages: tuple[StagePlan, ...]
    choices: Sequence[Choice]
    timelines: Sequence[Timeline]


class Move(NamedTuple):
    gain: float
    """Seconds that a backward pass gets shorter."""
    kept: float
    """Bytes that a micro-batch keeps more."""
    new: dict[int, Choice]
    """Choices by layer."""


def exchanged(costs: Costs, grid: Grid, problem: Problem, cuts: Cuts, best: Plan) -> Plan:
    """Return the plan that exchanges of choices lead to; each exchange makes the step shorter."""
    left = COUNTED_LAYERS // len(problem.layers)
    moves = _moves(problem, cuts, best)
    while left and (choices := next(moves, None)) is not None:
        made = assigned(problem, cuts, choices)
        if made.price >= best.price:
            continue
        left -= 1
        timelines = costs.timelines(grid, cuts, [choice.name for choice in choices])
        if max(each.highest for each in timelines) <= problem.budget:
            best = Plan(made.price, made.stages, choices, timelines)
            moves = _moves(problem, cuts, best)
    return best


def _moves(problem: Problem, cuts: Cuts, plan: Plan) -> Iterator[Sequence[Choice]]:
    """Yield the plan with another choice of one layer, and then of two layers that exchange memory,
    the fastest first."""
    places: defaultdict[Hashable, list[int]] = defaultdict(list)
    for chunk, (begin, end) in enumerate(problem.ranges(cuts)):
        for layer in range(begin, end):
            places[chunk, problem.layers[layer], plan.choices[layer].name.key].append(layer)
    # Of alike layers of a chunk with the same choice, the first and the last one change.
    ends = sorted({layer for layers in places.values() for layer in (layers[0], layers[-1])})
    single = [
        Move(old.backward - new.backward, new.kept - old.kept, {layer: new})
        for layer in ends
        for old in [plan.choices[layer]]
        for new in problem.sorts[problem.layers[layer]].choices
        if new is not old
    ]
    yield from _in_turn(plan, single)
    for stage, timeline in enumerate(plan.timelines):
        free = problem.budget - timeline.highest
        ranges = [problem.ranges(cuts)[chunk] for chunk in problem.own(stage)]
        own = {layer for begin, end in ranges for layer in range(begin, end)}
        moves = [move for move in single if own.issuperset(move.new)]
        yield from _in_turn(
            plan,
            [
                Move(one.gain + other.gain, one.kept + other.kept, {**one.new, **other.new})
                for one, other in combinations(moves, 2)
                if one.new.keys() != other.new.keys() and one.kept + other.kept <= free
            ],
        )


def _in_turn(plan: Plan, moves: Iterable[Move]) -> Iterator[Sequence[Choice]]:
    useful = [move for move in moves if move.gain > 0]
    for move in sorted(useful, key=lambda move: (move.gain, *move.new), reverse=True):
        yield [move.new.get(layer, old) for layer, old in enumerate(plan.choices)]
