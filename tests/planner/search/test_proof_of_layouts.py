"""The proof of "no plan": no bound is above the counted memory, and it agrees with trying all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.accounting.pieces import Pass, Passes, PassSegment
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.recompute import Rule
from headrace.planner.division.bounds import fastest_bound, quick_bound
from headrace.planner.division.problem import fullest_moments
from headrace.planner.grid.grid import Grid, enumerate_grids, enumerate_shapes
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.search.make import uniform_phase
from headrace.planner.search.proof.min_memory import (
    MinMemory,
    find_fitting_plan,
    may_fit,
    min_passes,
)
from headrace.planner.search.search import search
from headrace.planner.traces.work import RULES
from headrace.trainer.layout.schedules import SCHEDULES
from headrace.trainer.run.config import RunConfig

PER_NODE = 8
MODELS = ("tiny-hybrid", "tiny-mamba", "tiny-moe", "tiny-transformer", "tiny-zamba")
ALL = frozenset(range(len(RULES)))
ROUNDING = 1e-12


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def costs_of(model: ModelConfig, rows: int) -> Costs:
    machine = Machine(Hardware.load("h100"), "bf16", roofline=True)
    run = replace(RunConfig(), precision="bf16")
    return Costs(model, run, machine, uniform_phase(256, rows))


@cache
def small() -> Costs:
    """Two layers of different kinds, so that all plans can be counted."""
    model = load_model_config("tiny-transformer")
    return costs_of(replace(model, pattern="[attention/none, attention]"), 4)


def grids(costs: Costs, gpus: int) -> list[Grid]:
    return [
        grid
        for shape, *_ in enumerate_shapes(costs.model, gpus, PER_NODE, costs.phase)
        if shape is not None
        for grid in enumerate_grids(shape, costs.model, gpus, PER_NODE, costs.precision)
    ]


def bounds(costs: Costs, grid: Grid, cuts: tuple[int, ...], stage: int) -> list[float]:
    """Return all bounds of a stage: floors and timelines, with its rows and with one row."""
    layers = len(costs.trace.layers)
    ranges = list(pairwise((0, *cuts, layers)))[stage :: grid.layout.pp]
    found: list[float] = []
    for least in (MinMemory(costs, grid), MinMemory(costs, grid, rows=1)):
        found.append(least.floors.stage(stage, ranges))
        found.append(least.stage(cuts, stage, [ALL] * layers).highest)
    return found


def check_bounds(costs: Costs, gpus: int, number: int, draw: random.Random) -> float:
    """Check the bounds of random plans; return the greatest bound beside the counted memory."""
    layers, most = len(costs.trace.layers), 0.0
    for grid in draw.sample(grids(costs, gpus), number):
        cuts = tuple(sorted(draw.sample(range(1, layers), grid.layout.all_chunks - 1)))
        rules: list[Rule] = [draw.choice(RULES)] * layers
        if draw.random() < 0.5:
            rules = [draw.choice(RULES) for _ in range(layers)]
        counted = costs.memory.timelines(grid, grid.engine, cuts, rules)
        assert MinMemory(costs, grid).floors.mean <= max(each.highest for each in counted)
        for stage, timeline in enumerate(counted):
            bound = max(bounds(costs, grid, cuts, stage))
            assert bound <= timeline.highest, (grid.name(), cuts, rules, stage)
            most = max(most, bound / timeline.highest)
    return most


@pytest.mark.slow
def test_no_bound_is_above_the_counted_memory() -> None:
    draw = random.Random(1)
    most = check_bounds(small(), 2, 4, draw)
    assert most > 0.9  # negative control: a bound that is a ninth higher is found


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_no_bound_is_above_the_counted_memory_of_any_model(name: str) -> None:
    check_bounds(costs_of(load_model_config(name), 16), 4, 20, random.Random(2))


def least_by_trying(costs: Costs, grid: Grid) -> float:
    """Return the least counted memory over all divisions and all rules of all layers."""
    layers, found = len(costs.trace.layers), float("inf")
    for cuts in combinations(range(1, layers), grid.layout.all_chunks - 1):
        for rules in product(RULES, repeat=layers):
            counted = costs.memory.timelines(grid, grid.engine, cuts, rules)
            found = min(found, max(each.highest for each in counted))
    return found


def check_proof(costs: Costs, some: list[Grid]) -> list[float]:
    """Check the decision of each layout; return the least memory of each."""
    every = []
    for grid in some:
        every.append(least := least_by_trying(costs, grid))
        plan = find_fitting_plan(MinMemory(costs, grid), least)
        assert plan is not None, grid.name()
        counted = costs.memory.timelines(grid, grid.engine, plan.cuts, plan.rules)
        assert max(each.highest for each in counted) == least
        assert may_fit(MinMemory(costs, grid), least)
        assert find_fitting_plan(MinMemory(costs, grid), least - 1) is None, grid.name()
    return every


@pytest.mark.slow
def test_the_proof_of_a_layout_agrees_with_trying_all_plans() -> None:
    draw = random.Random(3)
    alone = [grid for grid in grids(small(), 2) if grid.layout.pp == 1]
    stages = [grid for grid in grids(small(), 2) if grid.layout.pp == 2]
    check_proof(small(), [*draw.sample(alone, 2), *draw.sample(stages, 2)])


@pytest.mark.long
def test_no_plan_agrees_with_trying_all_layouts() -> None:
    costs = small()
    least = min(check_proof(costs, grids(costs, 2)))
    none = search(costs, 2, least - 1)
    assert not none.candidates
    assert not none.undecided
    found = search(costs, 2, least)
    assert found.candidates
    assert max(each.highest for each in found.candidates[0].timelines) <= least


@given(st.integers(0, 1_000_000))
@settings(deadline=None, max_examples=100)
def test_the_least_of_several_rules_is_below_each_of_them(seed: int) -> None:
    draw = random.Random(seed)
    every = [_passes(draw) for _ in range(3)]
    least = _levels(min_passes(every))
    for passes in every:
        assert all(a <= b for a, b in zip(least, _levels(passes), strict=True))


def _passes(draw: random.Random) -> Passes:
    kept = draw.randint(0, 9)
    pieces, level = [], kept
    for number in range(3):
        change = draw.randint(-level, 5)
        pieces.append(
            PassSegment(max(0, change) + draw.randint(0, 9), change, f"weight {number}", 4)
        )
        level += change
    return Passes((PassSegment(kept + draw.randint(0, 9), kept),), tuple(pieces))


def _levels(passes: Passes) -> list[int]:
    """Return the highest level of each piece, and the level after it."""
    found, level = [], 0
    every: Pass = (*passes.forward, *passes.backward)
    for piece in every:
        found.append(level + piece.high)
        level += piece.change
        found.append(level)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 8, 40])
def test_the_fullest_moment_is_one_of_the_schedule(schedule: str, micro_batches: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    for stage, order in enumerate(SCHEDULES[schedule].orders(4, chunks, micro_batches)):
        found = fullest_moments(SCHEDULES[schedule], 4, chunks, micro_batches)[stage]
        now, moments = [0] * chunks, []
        for action in order:
            if action.kind == "backward":
                moments.append((tuple(now), action.chunk // 4))
            now[action.chunk // 4] += 1 if action.kind == "forward" else -1
        assert tuple(found) in moments
        assert sum(found.in_flight) == max(sum(alive) for alive, _ in moments)


@pytest.mark.slow
def test_a_bound_that_is_too_high_is_found() -> None:
    """Negative control: the passes of the fastest rule are above a plan that recomputes."""
    costs = small()
    grid = next(each for each in grids(costs, 2) if each.layout.pp == 1)
    least, layers = MinMemory(costs, grid), len(costs.trace.layers)
    fastest = [frozenset({RULES.index("none")})] * layers
    [counted] = costs.memory.timelines(grid, grid.engine, (), ["block"] * layers)
    assert least.stage((), 0, [ALL] * layers).highest <= counted.highest
    assert least.stage((), 0, fastest).highest > counted.highest


@pytest.mark.parametrize("name", MODELS)
def test_the_fastest_choices_are_a_bound_of_every_budget(name: str) -> None:
    """And the bound itself, where all choices fit."""
    costs, draw = costs_of(load_model_config(name), 16), random.Random(name)
    higher = 0
    for grid in draw.sample(grids(costs, 8), 40):
        for simulate in (False, True):
            fastest = fastest_bound(costs.fastest_problem(grid, simulate=simulate))
            problem = costs.problem(grid, 1e15, simulate=simulate)
            assert quick_bound(problem) == pytest.approx(fastest, rel=ROUNDING)
            within = quick_bound(replace(problem, budget=draw.uniform(1e6, 1e7)))
            assert within >= fastest * (1 - ROUNDING)
            higher += within > fastest * (1 + ROUNDING)
    assert higher > 0
