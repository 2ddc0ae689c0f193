"""The proof of "no plan": the least memory of all divisions, interleaved ones among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner.cases import least_bytes, random_problem

from headrace.planner.division.bounds import find_min_memory_cuts
from headrace.planner.division.interleaved import (
    Stages,
    find_min_memory_division,
    initial_cuts,
)
from headrace.planner.division.knapsack import Knapsack
from headrace.planner.division.problem import Choice, LayerKind, Problem
from headrace.planner.division.solve import solve
from headrace.trainer.layout.schedules import SCHEDULES

SEEDS = range(60)


def needed(problem: Problem, cuts: tuple[int, ...]) -> float:
    """Return the least bytes of the fullest stage of a division."""
    stages, ranges = Stages(problem), problem.ranges(cuts)
    return max(
        stages.bytes(stage, tuple(stages.counts(*ranges[n]) for n in problem.stage_chunks(stage)))
        for stage in range(problem.stages)
    )


def test_the_least_interleaved_memory_is_that_of_all_divisions() -> None:
    beaten = 0
    for seed in SEEDS:
        problem = random_problem(seed, ("interleaved",))
        if problem.chunks == 1:
            continue
        least = least_bytes(problem)
        found = find_min_memory_division(problem)
        assert found.complete
        assert found.cuts is not None
        assert found.bytes == pytest.approx(least), seed
        assert needed(problem, found.cuts) == pytest.approx(least)
        # A ceiling at the least is the proof that nothing is below it.
        none = find_min_memory_division(problem, least)
        assert none.cuts is None
        assert none.complete
        beaten += min(needed(problem, cuts) for cuts in initial_cuts(problem)) > least * (1 + 1e-9)
    # Negative control: divisions into equal layers, times and bytes alone need more.
    assert beaten > 3


def test_a_division_is_found_where_those_that_are_tried_first_do_not_fit() -> None:
    """Heavy layers stand in two heaps, and only two of them fit on a stage."""
    heavy = LayerKind(forward=1.0, choices=(Choice(backward=2.0, state=10.0),))
    light = LayerKind(forward=1.0, choices=(Choice(backward=2.0, state=1.0),))
    problem = Problem(
        kinds=(heavy, light),
        layers=(*(0,) * 4, *(1,) * 12, *(0,) * 4),
        micro_batches=4,
        budget=23.0,
        stages=4,
        chunks=2,
        schedule=SCHEDULES["interleaved"],
    )
    assert all(needed(problem, cuts) > problem.budget for cuts in initial_cuts(problem))
    solution = solve(problem)
    assert solution is not None
    assert max(stage.memory for stage in solution.stages) <= problem.budget
    assert solve(replace(problem, budget=22.9)) is None
    proof = find_min_memory_division(problem, 23.0)
    assert proof.complete
    assert proof.cuts is None


def test_a_search_that_stops_early_does_not_say_that_it_is_complete() -> None:
    problem = random_problem(3, ("interleaved",))
    problem = replace(problem, stages=2, chunks=2, schedule=SCHEDULES["interleaved"])
    assert not find_min_memory_division(problem, max_nodes=1).complete


def test_least_cuts_reach_the_least_memory() -> None:
    for seed in SEEDS:
        problem = random_problem(seed)
        least, cuts = find_min_memory_cuts(problem)
        assert least == pytest.approx(least_bytes(problem)), seed
        knapsack = Knapsack(replace(problem, budget=least * (1 + 1e-9)))
        ranges = problem.ranges(cuts)
        assert all(knapsack.stage(n, [ranges[n]]) for n in range(problem.stages))
