"""Plans of traced layers beside all choices of their layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support.planner.hardware import cpu_hardware

from headrace.models.config.config import ModelConfig, load_model_config
from headrace.planner.division.problem import price_division
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.search import exchange
from headrace.planner.search.make import uniform_phase
from headrace.planner.search.search import search
from headrace.trainer.run.config import RunConfig

WANTED = {"pp": 1, "tp": 1, "cp": 1, "engine": "fsdp2", "gather": "step", "rows": 4}


def make_costs(model: ModelConfig, hardware: Path) -> Costs:
    machine = Machine(Hardware.load(hardware), "fp32", roofline=True)
    run = replace(RunConfig(), precision="fp32")
    return Costs(model, run, machine, uniform_phase(128, 16))


@pytest.mark.slow
def test_the_search_is_near_the_best_choices_of_traced_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All choices of three layers are counted by their timelines. A search finds a plan wherever
    one fits, at most 1% slower than the best. Negative control: without exchanges it is not."""
    hardware = cpu_hardware(tmp_path)
    whole = load_model_config("tiny-hybrid")
    operators = {
        name: operator for name, operator in whole.operators.items() if name not in ("se", "mamba")
    }
    model = replace(whole, pattern="[mr, li, attention]", operators=operators)
    costs = make_costs(model, hardware)
    [any_plan] = search(costs, 2, 1e12, settings=WANTED, num_best=1).candidates
    grid, problem = any_plan.grid, any_plan.problem
    every = []
    for choices in product(*(problem.kinds[kind].choices for kind in problem.layers)):
        [timeline] = costs.timelines(grid, (), [choice.name for choice in choices])
        every.append((price_division(problem, (), choices).price, timeline.highest))
    min_bytes, max_bytes = (act(bytes for _, bytes in every) for act in (min, max))
    gaps = []
    for counted in (exchange.COUNTED_LAYERS, 0):
        monkeypatch.setattr(exchange, "COUNTED_LAYERS", counted)
        gaps.append(0.0)
        for part in (0.0, 0.05, 0.2, 0.4, 0.6, 0.8):
            budget = min_bytes + part * (max_bytes - min_bytes)
            best = min(price for price, size in every if size <= budget)
            [result] = search(
                make_costs(model, hardware), 2, budget, settings=WANTED, num_best=1
            ).candidates
            assert max(timeline.highest for timeline in result.timelines) <= budget
            gaps[-1] = max(gaps[-1], result.solution.price / best - 1)
    assert gaps[0] < 0.01 < gaps[1]
