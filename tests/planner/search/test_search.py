"""The division into stages and the choices of layers: as good as trying everything."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planner.cases import brute_force, random_problem
from support.planner.memory import max_in_flight

from headrace.planner.division import knapsack as knapsack_module
from headrace.planner.division.bounds import Bounds, find_min_memory_cuts, quick_bound
from headrace.planner.division.knapsack import Knapsack, Tie
from headrace.planner.division.linear import min_seconds, min_seconds_over_limits, workspace_limits
from headrace.planner.division.problem import (
    Choice,
    LayerKind,
    Problem,
    price,
)
from headrace.planner.division.solve import solve
from headrace.trainer.layout.cuts import even_cuts
from headrace.trainer.layout.schedules import SCHEDULES

CASES = 600


@pytest.mark.slow
def test_the_search_equals_brute_force() -> None:
    """Feasible and infeasible cases, and stages of one to four, are all among them."""
    stages: set[int] = set()
    infeasible = wrong_when_even = 0
    for seed in range(CASES):
        problem = random_problem(seed)
        least = brute_force(problem)
        solution = solve(problem)
        assert (solution is None) == math.isinf(least), seed
        if solution is None:
            infeasible += 1
            assert find_min_memory_cuts(problem)[0] > problem.budget
            continue
        assert solution.price == pytest.approx(least), seed
        assert solution.bound == solution.price, seed
        assert find_min_memory_cuts(problem)[0] <= problem.budget
        assert max(stage.memory for stage in solution.stages) <= problem.budget
        stages.add(problem.stages)
        cuts = even_cuts(len(problem.layers), problem.stages)
        wrong_when_even += brute_force(problem, [cuts]) > least * (1 + 1e-9)
    assert stages == {1, 2, 3, 4}
    assert 50 < infeasible < CASES / 2
    # Negative control: a search that divides the layers evenly fails this test.
    assert wrong_when_even > 50


def test_interleaved_chunks_are_near_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1%, where equal sums are tried with fast passes in the first chunk and in the last.
    Negative control: in the first alone."""

    def find_worst() -> float:
        gaps = []
        for problem, least in zip(problems, prices, strict=True):
            solution = solve(problem)
            assert (solution is None) == math.isinf(least)
            if solution is not None:
                gaps.append(solution.price / least - 1)
        return max(gaps)

    problems = [random_problem(seed, ("interleaved",)) for seed in range(120)]
    prices = [brute_force(problem) for problem in problems]
    assert -1e-9 < find_worst() < 0.01
    monkeypatch.setattr(Tie.LAST, "_value_", Tie.FIRST.value)
    assert find_worst() > 0.02


@settings(deadline=None, max_examples=150)
@given(st.integers(1000, 1_000_000))
def test_no_bound_is_above_the_events(seed: int) -> None:
    problem = random_problem(seed, ("1f1b", "gpipe", "interleaved"))
    solution = solve(problem)
    if solution is None:
        return
    assert quick_bound(problem) <= solution.price * (1 + 1e-9)
    if problem.chunks == 1:
        assert Bounds(problem).bound() <= solution.price * (1 + 1e-9)


LAYERS, WAYS = 24, 4


def many_layers(seed: int) -> Problem:
    """Return a stage of many layers of one kind, whose frontier has thousands of points."""
    draw = random.Random(seed)
    seconds, size, choices = draw.uniform(10, 20), draw.uniform(8, 10), []
    for _ in range(WAYS):
        choices.append(Choice(backward=seconds, state=size))
        seconds, size = seconds + draw.uniform(0.5, 3), max(0.1, size - draw.uniform(0.5, 2.2))
    kind = LayerKind(forward=1.0, choices=tuple(choices))
    budget = LAYERS * draw.uniform(size, choices[0].state)
    return Problem(kinds=(kind,), layers=(0,) * LAYERS, micro_batches=1, budget=budget)


def test_many_alike_layers_are_near_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers of layers of each choice are tried."""
    numbers = [n for n in product(range(LAYERS + 1), repeat=WAYS - 1) if sum(n) <= LAYERS]
    counts = np.array([(*n, LAYERS - sum(n)) for n in numbers])
    problems = [many_layers(seed) for seed in range(60)]
    least = []
    for problem in problems:
        choices = problem.kinds[0].choices
        fits = counts @ np.array([choice.state for choice in choices]) <= problem.budget
        seconds = counts @ np.array([choice.backward for choice in choices])
        least.append(seconds[fits].min(initial=math.inf))

    def find_worst() -> float:
        gaps = []
        for problem, best in zip(problems, least, strict=True):
            plan = Knapsack(problem).stage(0, [(0, LAYERS)])
            assert (plan is None) == math.isinf(best)
            if plan is not None:
                assert plan.memory <= problem.budget
                gaps.append(plan.backward[0] / best - 1)
        return max(gaps)

    assert -1e-9 < find_worst() < 1e-3
    # Negative control: whole layers by linear programming alone are farther away.
    monkeypatch.setattr(knapsack_module, "EXACT_LAYERS", 1)
    assert find_worst() > 0.002


def mixed_layers(seed: int) -> Problem:
    """Return a stage of a few layers of three kinds, as tight as `many_layers`."""
    kinds = [many_layers(3 * seed + number) for number in range(3)]
    budget = sum(each.budget for each in kinds) / LAYERS * 3
    every = tuple(kind for each in kinds for kind in each.kinds)
    return replace(kinds[0], kinds=every, layers=(0, 1, 2) * 3, budget=budget)


def test_few_layers_of_several_kinds_equal_brute_force() -> None:
    num_plans = 0
    for seed in range(20):
        problem = mixed_layers(seed)
        numbers = [n for n in product(range(4), repeat=WAYS) if sum(n) == 3]
        times, sizes = np.zeros(1), np.zeros(1)
        for kind in problem.kinds:
            choices = np.array([(choice.backward, choice.state) for choice in kind.choices])
            kind_times, kind_sizes = (np.array(numbers) @ choices).T
            times = (times[:, None] + kind_times).ravel()
            sizes = (sizes[:, None] + kind_sizes).ravel()
        plan = Knapsack(problem).stage(0, [(0, len(problem.layers))])
        best = times[sizes <= problem.budget].min(initial=math.inf)
        assert (plan is None) == math.isinf(best)
        if plan is not None:
            assert plan.backward[0] == pytest.approx(best)
            num_plans += 1
    assert num_plans > 5


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1_000_000), st.integers(1, 4), st.floats(0.2, 1.2))
def test_the_least_of_all_limits_is_found_without_trying_all(
    seed: int, alive: int, part: float
) -> None:
    problem = random_problem(seed)
    parts = [(kind, count, alive) for kind, count in enumerate(problem.layer_counts) if count]
    limits = workspace_limits(problem, set(problem.layers), 0.0)
    room = part * problem.budget
    every = [min_seconds(problem, parts, room - limit, limit) for limit in limits]
    assert min_seconds_over_limits(problem, parts, room, limits) == min(every)


def test_a_bound_that_is_too_high_is_detected() -> None:
    """Negative control of the test above: twice the bound is above the events."""
    solved = [(random_problem(seed), solve(random_problem(seed))) for seed in range(1000, 1040)]
    assert any(
        solution is not None and 2 * quick_bound(problem) > solution.price
        for problem, solution in solved
    )


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1_000_000), st.integers(0, 3), st.sampled_from(["forward", "backward"]))
def test_a_longer_pass_never_shortens_a_step(seed: int, stage: int, field: str) -> None:
    """The knapsack rests on it: less backward time is never worse."""
    problem = random_problem(seed, ("1f1b", "gpipe", "interleaved"))
    solution = solve(replace(problem, budget=1e9))
    assert solution is not None
    number = stage % problem.stages
    plans = list(solution.stages)
    passes = tuple(2 * time for time in getattr(plans[number], field))
    plans[number] = replace(plans[number], **{field: passes})
    assert price(problem, plans) >= solution.price


@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 4, 9, 24])
def test_memory_of_chunks_is_that_of_a_moment(chunks: int, micro_batches: int) -> None:
    """Equal chunks need at once what the schedule's lists say, not the sum of each one's most."""
    kind = LayerKind(forward=1.0, choices=(Choice(backward=2.0, activations=1.0),))
    schedule, stages = SCHEDULES["interleaved"], 4
    orders = schedule.orders(stages, chunks, micro_batches)
    peaks = [max_in_flight(order) for order in orders]
    problem = Problem(
        kinds=(kind,), layers=(0,) * stages * chunks, micro_batches=micro_batches,
        budget=max(peaks), stages=stages, chunks=chunks, schedule=schedule,
    )  # fmt: skip
    assert [sum(problem.in_flight(stage)) for stage in range(stages)] == peaks
    assert solve(problem) is not None
    assert solve(replace(problem, budget=max(peaks) - 0.5)) is None


def test_a_balanced_division_may_not_fit_where_another_does() -> None:
    """Stage 0 of 1F1B keeps more micro-batches, so that it must have fewer layers."""
    kind = LayerKind(forward=1.0, choices=(Choice(backward=2.0, activations=1.0),))
    problem = Problem(kinds=(kind,), layers=(0,) * 6, micro_batches=8, budget=4.0, stages=2)
    solution = solve(problem)
    assert solution is not None
    assert solution.cuts == (2,)
    assert solve(replace(problem, budget=3.9)) is None
    assert find_min_memory_cuts(problem)[0] == 4.0


def test_a_step_of_one_stage_is_the_sum_of_its_passes() -> None:
    kind = LayerKind(
        forward=1.0,
        choices=(Choice(backward=2.0, activations=10.0), Choice(backward=3.0, activations=1.0)),
        update=0.5,
    )
    problem = Problem(kinds=(kind,), layers=(0,) * 4, micro_batches=3, budget=22.0)
    solution = solve(problem)
    assert solution is not None
    # Two layers keep everything (20 bytes), two recompute (2 bytes): 3 · (4 + 2·2 + 2·3) + 4·0.5
    assert solution.price == 3 * 14 + 2
    assert solution.stages[0].counts == (((2, 2),),)
    assert solution.stages[0].memory == 22.0
