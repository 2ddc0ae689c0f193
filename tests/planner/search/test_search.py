"""The division into stages and the choices of layers: as good as trying everything."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planner.cases import brute_force, fits, random_problem
from support.planner.memory import max_in_flight

from headrace.planner.division import choices as choices_module
from headrace.planner.division import solve as solve_module
from headrace.planner.division.bounds import quick_bound
from headrace.planner.division.choices import Relaxation
from headrace.planner.division.problem import (
    Choice,
    LayerKind,
    Problem,
    StagePlan,
    price,
)
from headrace.planner.division.solve import Divisions, solve
from headrace.trainer.layout.cuts import even_cuts
from headrace.trainer.layout.schedules import SCHEDULES

CASES = 600


def test_the_search_is_near_brute_force() -> None:
    """Feasible and infeasible cases, and stages of one to four, are all among them."""
    stages: set[int] = set()
    infeasible = wrong_when_even = 0
    for seed in range(CASES):
        problem = random_problem(seed)
        optimum = brute_force(problem)
        solution = solve(problem)
        assert fits(problem, solution) == math.isfinite(optimum), seed
        if math.isinf(optimum):
            infeasible += 1
            continue
        assert solution is not None
        assert solution.bound <= optimum * (1 + 1e-9), seed
        assert optimum * (1 - 1e-9) <= solution.price <= 1.01 * optimum, seed
        stages.add(problem.stages)
        cuts = even_cuts(len(problem.layers), problem.stages)
        wrong_when_even += brute_force(problem, [cuts]) > 1.01 * optimum
    assert stages == {1, 2, 3, 4}
    assert 50 < infeasible < CASES / 2
    # Negative control: a search that divides the layers evenly fails this test.
    assert wrong_when_even > 50


def test_interleaved_chunks_are_near_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1%. Negative control: cuts into equal times alone."""

    def find_worst() -> float:
        gaps = []
        for problem, optimum in zip(problems, prices, strict=True):
            solution = solve(problem)
            if not fits(problem, solution):
                gaps.append(math.inf if math.isfinite(optimum) else 0.0)
            else:
                assert solution is not None
                gaps.append(solution.price / optimum - 1)
        return max(gaps)

    problems = [random_problem(seed, ("interleaved",)) for seed in range(120)]
    prices = [brute_force(problem) for problem in problems]
    assert -1e-9 < find_worst() < 0.01
    monkeypatch.setattr(Divisions, "list_starts", lambda self, start: [start])
    monkeypatch.setattr(solve_module, "MOVES", 0)
    assert find_worst() > 0.02


@settings(deadline=None, max_examples=150)
@given(st.integers(1000, 1_000_000))
def test_no_bound_is_above_the_events(seed: int) -> None:
    problem = random_problem(seed, ("1f1b", "gpipe", "interleaved"))
    solution = solve(problem)
    if solution is None or not fits(problem, solution):
        return
    assert quick_bound(problem) <= solution.price * (1 + 1e-9)
    if problem.chunks == 1:
        assert Divisions(problem).find_start().estimate <= solution.price * (1 + 1e-9)


def plan_stage(problem: Problem) -> StagePlan | None:
    """Return the plan of a single stage; None if it does not fit."""
    [[plan]] = Divisions(problem).plan_stages(())
    return plan if plan.memory <= problem.budget * (1 + 1e-9) else None


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
    optima = []
    for problem in problems:
        choices = problem.kinds[0].choices
        fits = counts @ np.array([choice.state for choice in choices]) <= problem.budget
        seconds = counts @ np.array([choice.backward for choice in choices])
        optima.append(seconds[fits].min(initial=math.inf))

    def find_worst() -> float:
        gaps = []
        for problem, best in zip(problems, optima, strict=True):
            plan = plan_stage(problem)
            assert (plan is None) == math.isinf(best)
            if plan is not None:
                assert plan.memory <= problem.budget * (1 + 1e-9)
                gaps.append(plan.backward[0] / best - 1)
        return max(gaps)

    assert -1e-9 < find_worst() < choices_module.GAP
    # Negative control: whole layers by linear programming alone are farther away.
    monkeypatch.setattr(choices_module, "EXACT_LAYERS", 1)
    assert find_worst() > 0.002


def mixed_layers(seed: int) -> Problem:
    """Return a stage of a few layers of three kinds, as tight as `many_layers`."""
    kinds = [many_layers(3 * seed + number) for number in range(3)]
    budget = sum(kind.budget for kind in kinds) / LAYERS * 3
    every = tuple(kind for item in kinds for kind in item.kinds)
    return replace(kinds[0], kinds=every, layers=(0, 1, 2) * 3, budget=budget)


def test_few_layers_of_several_kinds_are_near_brute_force() -> None:
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
        plan = plan_stage(problem)
        best = times[sizes <= problem.budget].min(initial=math.inf)
        assert (plan is None) == math.isinf(best)
        if plan is not None:
            assert plan.backward[0] == pytest.approx(best, rel=choices_module.GAP)
            num_plans += 1
    assert num_plans > 5


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1_000_000), st.integers(1, 4), st.floats(0.2, 1.2))
def test_the_least_of_all_limits_is_found_without_trying_all(
    seed: int, alive: int, part: float
) -> None:
    problem = random_problem(seed)
    relaxation = Relaxation(problem, [alive])
    counts, room = problem.counts[-1:], part * problem.budget
    every = relaxation.backward(counts[0], room - relaxation.limits, slice(None))
    [smallest] = relaxation.table(counts, np.array([room]))
    assert smallest == pytest.approx(every.min())


def test_a_bound_that_is_too_high_is_detected() -> None:
    """Negative control of the test above: twice the bound is above the events."""
    solved = [(problem, solve(problem)) for problem in map(random_problem, range(1000, 1040))]
    assert any(
        fits(problem, solution) and 2 * quick_bound(problem) > solution.price
        for problem, solution in solved
    )


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1_000_000), st.integers(0, 3), st.sampled_from(["forward", "backward"]))
def test_a_longer_pass_never_shortens_a_step(seed: int, stage: int, field: str) -> None:
    """The choices of a stage rest on it: less backward time is never worse."""
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
    assert fits(problem, solve(problem))
    tight = replace(problem, budget=max(peaks) - 0.5)
    assert not fits(tight, solve(tight))


def tight_chunks(seed: int) -> Problem:
    """Return two stages of two chunks with a tenth more memory than the best of all cuts needs."""
    draw = random.Random(seed)
    kinds = [
        LayerKind(
            forward=draw.uniform(1, 3),
            choices=(Choice(4.0, state=draw.uniform(1, 3), activations=draw.uniform(0.5, 2)),),
        )
        for _ in range(2)
    ]
    problem = Problem(
        kinds=tuple(kinds), layers=tuple(draw.randrange(2) for _ in range(20)),
        micro_batches=draw.choice([3, 4, 8]), budget=1.0, stages=2, chunks=2,
        schedule=SCHEDULES["interleaved"],
    )  # fmt: skip
    peaks = []
    for cuts in combinations(range(1, 20), 3):
        memory = [0.0, 0.0]
        for chunk, (first, end) in enumerate(problem.ranges(cuts)):
            stage = chunk % 2
            in_flight = problem.in_flight(stage)[chunk // 2]
            for kind in problem.layers[first:end]:
                memory[stage] += problem.kinds[kind].choices[0].bytes(in_flight)
        peaks.append(max(memory))
    return replace(problem, budget=1.1 * min(peaks))


def test_chunks_with_more_in_flight_have_fewer_layers() -> None:
    """A division is found where chunks of equal times do not fit."""
    num_misfits = 0
    for seed in range(6):
        problem = tight_chunks(seed)
        assert fits(problem, solve(problem)), seed
        divisions = Divisions(problem)
        equal = divisions.price(divisions.find_start().cuts)
        num_misfits += max(stage.memory for stage in equal.stages) > problem.budget
    assert num_misfits > 2


def test_a_balanced_division_may_not_fit_where_another_does() -> None:
    """Stage 0 of 1F1B keeps more micro-batches, so that it must have fewer layers."""
    kind = LayerKind(forward=1.0, choices=(Choice(backward=2.0, activations=1.0),))
    problem = Problem(kinds=(kind,), layers=(0,) * 6, micro_batches=8, budget=4.0, stages=2)
    solution = solve(problem)
    assert solution is not None
    assert solution.cuts == (2,)
    tight = replace(problem, budget=3.9)
    assert not fits(tight, solve(tight))


def test_what_does_not_fit_has_the_smallest_excess() -> None:
    """The bytes beyond the budget decide before the seconds."""
    kind = LayerKind(
        forward=1.0,
        choices=(Choice(backward=2.0, state=10.0), Choice(backward=3.0, state=4.0)),
    )
    problem = Problem(kinds=(kind,), layers=(0,) * 6, micro_batches=4, budget=11.0, stages=2)
    solution = solve(problem)
    assert solution is not None
    assert [stage.memory for stage in solution.stages] == [12.0, 12.0]
    assert solve(problem, ceiling=1e3) is None


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
    assert sorted(solution.choices) == sorted(2 * kind.choices)
    assert solution.stages[0].memory == 22.0
