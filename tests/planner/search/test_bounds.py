"""Bounds of layouts and the fullest moment of schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.models.config.config import ModelConfig, load_model_config
from headrace.planner.division.bounds import quick_bound
from headrace.planner.division.problem import fullest_moments
from headrace.planner.grid.grid import Grid, enumerate_grids, enumerate_shapes
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.search.make import uniform_phase
from headrace.planner.search.search import bound_state
from headrace.planner.traces.work import RULES
from headrace.trainer.layout.cuts import even_cuts
from headrace.trainer.layout.schedules import SCHEDULES
from headrace.trainer.run.config import RunConfig

PER_NODE = 8
MODELS = ("tiny-hybrid", "tiny-mamba", "tiny-moe", "tiny-transformer", "tiny-zamba")
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


def grids(costs: Costs, gpus: int) -> list[Grid]:
    return [
        grid
        for shape, *_ in enumerate_shapes(costs.model, gpus, PER_NODE, costs.phase)
        if shape is not None
        for grid in enumerate_grids(shape, costs.model, gpus, PER_NODE, costs.precision)
    ]


@pytest.mark.slow
def test_the_bound_of_the_state_is_below_the_counted_memory() -> None:
    costs, draw = costs_of(load_model_config("tiny-transformer"), 16), random.Random(2)
    layers, largest = len(costs.trace.layers), 0.0
    for grid in draw.sample(grids(costs, 4), 8):
        cuts = even_cuts(layers, grid.layout.all_chunks)
        rules = [draw.choice(RULES)] * layers
        counted = costs.memory.timelines(grid, grid.engine, cuts, rules)
        peak = max(timeline.highest for timeline in counted)
        assert bound_state(costs, grid) <= peak, grid.name()
        largest = max(largest, bound_state(costs, grid) / peak)
    assert largest > 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 8, 40])
def test_the_fullest_moment_is_one_of_the_schedule(schedule: str, micro_batches: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    for stage, order in enumerate(SCHEDULES[schedule].orders(4, chunks, micro_batches)):
        result = fullest_moments(SCHEDULES[schedule], 4, chunks, micro_batches)[stage]
        now, moments = [0] * chunks, []
        for action in order:
            if action.kind == "backward":
                moments.append((tuple(now), action.chunk // 4))
            now[action.chunk // 4] += 1 if action.kind == "forward" else -1
        assert tuple(result) in moments
        assert sum(result.in_flight) == max(sum(alive) for alive, _ in moments)


@pytest.mark.parametrize("name", MODELS)
def test_the_fastest_choices_are_a_bound_of_every_budget(name: str) -> None:
    """And the bound itself, where all choices fit."""
    costs, draw = costs_of(load_model_config(name), 16), random.Random(name)
    higher = 0
    for grid in draw.sample(grids(costs, 8), 40):
        for simulate in (False, True):
            fastest = quick_bound(costs.fastest_problem(grid, simulate=simulate))
            problem = costs.problem(grid, 1e15, simulate=simulate)
            assert quick_bound(problem) == pytest.approx(fastest, rel=ROUNDING)
            within = quick_bound(replace(problem, budget=draw.uniform(1e6, 1e7)))
            assert within >= fastest * (1 - ROUNDING)
            higher += within > fastest * (1 + ROUNDING)
    assert higher > 0
