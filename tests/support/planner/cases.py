"""Random planning problems, and their solution by trying everything."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from itertools import combinations, product

from headrace.planner.division.problem import (
    Choice,
    FixedCosts,
    LayerKind,
    Problem,
    Solution,
    StagePlan,
    price,
)
from headrace.trainer.layout.schedules import SCHEDULES


def random_problem(seed: int, schedules: tuple[str, ...] = ("1f1b", "gpipe")) -> Problem:
    """Return a small problem: kinds of different costs, a budget that is often tight."""
    draw = random.Random(seed)
    stages = draw.choice([1, 1, 2, 3, 4])
    schedule = draw.choice(schedules) if stages > 1 else "1f1b"
    chunks = 2 if schedule == "interleaved" else 1
    stages = 2 if schedule == "interleaved" else stages
    layers = draw.randint(max(stages * chunks, 2), 6)
    modules = tuple(
        FixedCosts(state=draw.randint(0, 6), update=draw.choice([0, 1]))
        for _ in range(draw.randint(0, 1))
    )
    kinds = tuple(_kind(draw, len(modules)) for _ in range(draw.randint(1, 3)))
    ends = [
        FixedCosts(
            forward=draw.randint(0, 4),
            backward=draw.randint(0, 6),
            state=draw.randint(0, 5),
            activations=draw.choice([0, 1]),
            workspace=draw.choice([0, 3, 9]),
            update=draw.choice([0, 2]),
        )
        for _ in range(2)
    ]
    return Problem(
        kinds=kinds,
        layers=tuple(draw.randrange(len(kinds)) for _ in range(layers)),
        micro_batches=draw.randint(1, 6),
        budget=draw.randint(6, 18) * layers / stages,
        stages=stages,
        chunks=chunks,
        schedule=SCHEDULES[schedule],
        message=draw.choice([0, 0, 0.5]),
        first=ends[0],
        last=ends[1],
        modules=modules,
    )


def _kind(draw: random.Random, modules: int) -> LayerKind:
    forward = draw.randint(1, 6)
    choices = [
        Choice(
            name=number,
            backward=forward * 2 + draw.randint(0, 5),
            state=draw.randint(0, 4),
            activations=draw.randint(0, 5),
            workspace=draw.randint(0, 6),
        )
        for number in range(draw.randint(1, 3))
    ]
    module = 0 if modules and draw.random() < 0.3 else None
    return LayerKind(
        forward=forward, choices=tuple(choices), update=draw.choice([0, 1]), module=module
    )


def fits(problem: Problem, solution: Solution | None) -> bool:
    """True if the bytes of all stages are within the budget."""
    if solution is None:
        return False
    return max(stage.memory for stage in solution.stages) <= problem.budget * (1 + 1e-9)


def all_cuts(problem: Problem) -> Iterator[tuple[int, ...]]:
    return combinations(range(1, len(problem.layers)), problem.all_chunks - 1)


def brute_force(problem: Problem, divisions: Iterable[tuple[int, ...]] | None = None) -> float:
    """Return the least price of all divisions and all choices of each layer; infinite if none
    fits."""
    prices: dict[tuple[StagePlan, ...], float] = {}
    for cuts in divisions or all_cuts(problem):
        ranges = problem.ranges(cuts)
        stages = [set(_plans(problem, stage, ranges)) for stage in range(problem.stages)]
        for plans in product(*stages):
            if plans not in prices:
                prices[plans] = price(problem, plans)
    return min(prices.values(), default=math.inf)


def _plans(problem: Problem, stage: int, ranges: list[tuple[int, int]]) -> Iterator[StagePlan]:
    """Yield the costs of each assignment of choices to a stage's layers that fits."""
    chunk_numbers, alive = problem.stage_chunks(stage), problem.in_flight(stage)
    layers = [
        (chunk, problem.kinds[problem.layers[layer]])
        for chunk, number in enumerate(chunk_numbers)
        for layer in range(*ranges[number])
    ]
    fixed = [
        (chunk, part)
        for chunk, number in enumerate(chunk_numbers)
        for part in problem.end_costs(number)
    ]
    called = {kind.module for _, kind in layers if kind.module is not None}
    modules = [problem.modules[number] for number in called]
    update = sum(kind.update for _, kind in layers) + sum(part.update for _, part in fixed)
    update += sum(module.update for module in modules)
    for assignment in product(*(kind.choices for _, kind in layers)):
        parts = [*((chunk, c) for (chunk, _), c in zip(layers, assignment, strict=True)), *fixed]
        memory = sum(module.state for module in modules) + max(part.workspace for _, part in parts)
        memory += sum(part.state + alive[chunk] * part.activations for chunk, part in parts)
        if memory > problem.budget:
            continue
        forward, backward = [0.0] * len(chunk_numbers), [0.0] * len(chunk_numbers)
        for chunk, kind in [*layers, *fixed]:
            forward[chunk] += kind.forward
        for chunk, part in parts:
            backward[chunk] += part.backward
        yield StagePlan(tuple(forward), tuple(backward), update, 0.0, ())
