"""What other programs do: a ring's sums, and messages of recomputed operations."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.models.config.config import load_model_config
from headrace.models.config.options.recompute import OPERATIONS, Selective
from headrace.planner.grid.split import Split
from headrace.planner.hardware import Hardware
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import Machine
from headrace.planner.prices.program import TrainingProgram
from headrace.planner.search.make import uniform_phase
from headrace.trainer.run.config import RunConfig

ELEMENTWISE = Selective(save=tuple(OPERATIONS))


@pytest.fixture(scope="module")
def costs() -> Costs:
    model, phase = load_model_config("tiny-transformer"), uniform_phase(256, 8)
    return Costs(model, RunConfig(precision="bf16"), build_machine(), phase)


def build_machine(**settings: Any) -> Machine:
    program = TrainingProgram(**settings)
    return Machine(Hardware.load("h100"), "bf16", roofline=True, program=program)


def test_single_operations_repeat_no_messages(costs: Costs) -> None:
    silent_costs = costs.replace_machine(build_machine(recompute_messages=False))
    split = Split(tp=2)
    [ours, *_], _ = costs.passes(split, 1)
    [theirs, *_], _ = silent_costs.passes(split, 1)
    assert ours.forward["tensor"] > 0
    saved = ours.recompute_seconds[ELEMENTWISE] - theirs.recompute_seconds[ELEMENTWISE]
    assert saved == pytest.approx(ours.forward["tensor"], rel=1e-9)
    assert ours.recompute_seconds["block"] == theirs.recompute_seconds["block"]


def test_a_ring_that_sums_in_one_kernel_moves_fewer_bytes(costs: Costs) -> None:
    split = Split(cp=2, attention="ring")
    seconds = [
        costs.replace_machine(build_machine(ring_traffic=share)).passes(split, 1)[0][0]
        for share in (1.0, 0.5, 0.0)
    ]
    computed = [passes.forward["compute"] for passes in seconds]
    assert computed[0] > computed[2] > 0
    assert computed[1] == pytest.approx((computed[0] + computed[2]) / 2, rel=0.01)
