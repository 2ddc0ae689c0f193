"""Solutions whose counted memory fits, beside all divisions and choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from support.planner.cases import all_cuts, random_problem

from headrace.planner.division.fit import Fit, fit
from headrace.planner.division.problem import Choice, Problem, Solution, price_division

SEEDS = range(120)


@dataclass(frozen=True)
class Memory:
    highest: float


def counted(problem: Problem, cuts: tuple[int, ...], choices: Sequence[Choice]) -> list[float]:
    """Count each stage: a layer works while what it and earlier layers keep is there, and later
    layers have given back what they kept. Weights of a neighbour add three bytes."""
    result = []
    for stage, (first, end) in enumerate(problem.ranges(cuts)):
        [alive] = problem.in_flight(stage)
        parts = [*choices[first:end], *problem.end_costs(stage)]
        held = sum(part.state for part in parts)
        modules = {problem.kinds[problem.layers[layer]].module for layer in range(first, end)}
        held += sum(problem.modules[number].state for number in modules - {None})
        kept = sum(part.activations for part in parts)
        fixed = sum(part.activations for part in problem.end_costs(stage))
        peak, before = (
            max((part.workspace + kept for part in problem.end_costs(stage)), default=0.0),
            fixed,
        )
        for choice in choices[first:end]:
            before += choice.activations
            peak = max(peak, before + choice.workspace)
        result.append(held + (alive - 1) * kept + peak + 3)
    return result


def best_of_all(problem: Problem) -> float:
    best = math.inf
    kinds = [problem.kinds[kind].choices for kind in problem.layers]
    for cuts in all_cuts(problem):
        for choices in product(*kinds):
            if max(counted(problem, cuts, choices)) <= problem.budget:
                best = min(best, price_division(problem, cuts, choices).price)
    return best


def fitted(problem: Problem) -> Fit[Memory] | None:
    def count(solution: Solution) -> list[Memory]:
        sizes = counted(problem, solution.cuts, solution.choices)
        return [Memory(size) for size in sizes]

    return fit(lambda: problem, count)


def test_a_fit_is_the_best_of_all_plans_by_the_count() -> None:
    fits = 0
    for seed in SEEDS:
        problem = random_problem(seed)
        best, result = best_of_all(problem), fitted(problem)
        assert result is not None
        if not result.fits:
            assert math.isinf(best), seed
            continue
        assert max(timeline.highest for timeline in result.timelines) <= problem.budget
        assert result.solution.price == pytest.approx(best, rel=0.01), seed
        fits += 1
    assert fits > len(SEEDS) / 3


def test_a_guess_that_is_too_high_is_taken_back() -> None:
    problem = next(
        p for p in map(random_problem, SEEDS) if (result := fitted(p)) is not None and result.fits
    )
    plain = fitted(problem)
    assert plain is not None

    def count(solution: Solution) -> list[Memory]:
        sizes = counted(problem, solution.cuts, solution.choices)
        return [Memory(size) for size in sizes]

    guessed = fit(lambda: problem, count, guess=(problem.budget,) * problem.stages)
    assert guessed is not None and guessed.fits
    assert guessed.solution.price <= plain.solution.price * 1.5
