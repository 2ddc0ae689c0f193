"""Improve a plan's choices for single layers, by the step's timeline.

A search adds up the bytes in a stage's layers, plus their largest workspace. The timeline also
knows a layer's position. The last layer runs its backward pass first: its recomputed results are
alive at the peak in any case, so keeping them may cost nothing. Single layers, and pairs, take
faster choices as long as the plan still fits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from ..division.problem import Choice, price_division
from ..prices.layers import Costs
from .outcome import Candidate

COUNTED_LAYERS = 150
"""Maximum number of layers in all timelines counted for a plan: 30 timelines for 5 layers, 3 for
50."""


class Move(NamedTuple):
    """New choices for one or two layers."""

    saved_seconds: float
    """Seconds by which a backward pass gets shorter."""
    added_bytes: float
    """Additional activation bytes per micro-batch."""
    choices: dict[int, Choice]
    """New choices by layer."""


def exchange_choices(costs: Costs, candidate: Candidate) -> Candidate:
    """Improve a plan greedily: take the first move that shortens the step and fits, then begin
    again from the result."""
    grid, problem, cuts = candidate.grid, candidate.problem, candidate.solution.cuts
    num_timelines = COUNTED_LAYERS // len(problem.layers)
    moves = _enumerate_moves(candidate)
    while num_timelines and (move := next(moves, None)) is not None:
        solution = candidate.solution
        choices = [move.choices.get(layer, old) for layer, old in enumerate(solution.choices)]
        division = price_division(problem, cuts, choices)
        if division.price >= solution.price:
            continue
        num_timelines -= 1
        timelines = costs.timelines(grid, cuts, [choice.name for choice in choices])
        if max(timeline.highest for timeline in timelines) <= problem.budget:
            solution = division.bounded(solution.bound)
            candidate = replace(candidate, solution=solution, timelines=timelines)
            moves = _enumerate_moves(candidate)
    return candidate


def _enumerate_moves(candidate: Candidate) -> Iterator[Move]:
    """Yield the moves by a single layer, fastest first, then those by two layers of a stage that
    exchange memory."""
    problem, solution = candidate.problem, candidate.solution
    moves_by_stage: list[list[Move]] = [[] for _ in solution.stages]
    for chunk, layer_range in enumerate(problem.ranges(solution.cuts)):
        # Of identical layers in a chunk with the same choice, only the first and the last change.
        identical_layers: dict[Hashable, list[int]] = {}
        for layer in range(*layer_range):
            key = problem.layers[layer], solution.choices[layer].name.key
            identical_layers.setdefault(key, []).append(layer)
        moves_by_stage[chunk % problem.stages] += [
            Move(old.backward - new.backward, new.activations - old.activations, {layer: new})
            for layers in identical_layers.values()
            for layer in sorted({layers[0], layers[-1]})
            for old in [solution.choices[layer]]
            for new in problem.kinds[problem.layers[layer]].choices
        ]
    yield from _sort_useful(move for moves in moves_by_stage for move in moves)
    for moves, timeline in zip(moves_by_stage, candidate.timelines, strict=True):
        free = problem.budget - timeline.highest
        yield from _sort_useful(
            Move(
                a.saved_seconds + b.saved_seconds,
                a.added_bytes + b.added_bytes,
                a.choices | b.choices,
            )
            for a, b in combinations(moves, 2)
            if a.choices.keys() != b.choices.keys() and a.added_bytes + b.added_bytes <= free
        )


def _sort_useful(moves: Iterable[Move]) -> list[Move]:
    """Return the moves that save seconds, fastest first."""
    useful = [move for move in moves if move.saved_seconds > 0]
    return sorted(useful, key=lambda move: (move.saved_seconds, *move.choices), reverse=True)
