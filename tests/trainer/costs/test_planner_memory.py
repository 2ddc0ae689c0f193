"""The state that the planner counts is the one that `models show` and the engine count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.models.accounting.count import build_meta
from headrace.models.accounting.memory import rank_shards
from headrace.models.accounting.state import Degrees, device_bytes, state_bytes
from headrace.models.config import load_model_config
from headrace.models.precision import PRECISIONS
from headrace.trainer.costs.hardware import Hardware
from headrace.trainer.costs.planner.layers import Costs
from headrace.trainer.costs.planner.machine import Machine
from headrace.trainer.costs.planner.make import uniform_phase
from headrace.trainer.costs.state import engine_state
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.engine import EngineConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.run.config import RunConfig

MODEL = load_model_config("tiny-transformer")
DP = 4


@pytest.fixture(scope="module")
def costs() -> Costs:
    machine = Machine(Hardware.load("h100"), "bf16")
    return Costs(MODEL, replace(RunConfig(), precision="bf16"), machine, uniform_phase(64, 16))


def counted(costs: Costs, engine: EngineConfig) -> float:
    """Return the bytes that the engine counts on a device for the whole model."""
    run = replace(costs.run, engine=engine)
    parts = engine_state(run, build_meta(MODEL), PRECISIONS["bf16"], "cuda").parts
    degrees = Degrees(dp=DP)
    return device_bytes(state_bytes(parts, rank_shards(MODEL, degrees, 0), degrees))


def planned(costs: Costs, engine: EngineConfig) -> float:
    """Return the bytes of all layers and both ends."""
    memory = costs.memory(engine, 1, DP, 1, 1, 1)
    layers = sum(memory.layers[sort] for sort in costs.trace.layers)
    return layers + memory.first + memory.last + sum(memory.modules) + memory.buffers


@pytest.mark.parametrize(
    "engine",
    [
        Fsdp2Config(gather="micro-batch"),
        Fsdp2Config(gather="step"),
        *(DeepSpeedConfig(zero=stage) for stage in range(4)),
    ],
    ids=["micro-batch", "step", "zero0", "zero1", "zero2", "zero3"],
)
def test_layers_add_up_to_the_state_of_the_engine(costs: Costs, engine: EngineConfig) -> None:
    assert planned(costs, engine) == pytest.approx(counted(costs, engine), rel=1e-3)


@pytest.mark.parametrize("ahead", [1, 2])
def test_weights_of_blocks_are_whole_while_they_run_alone(costs: Costs, ahead: int) -> None:
    engine = Fsdp2Config(gather="block", backward_prefetch=ahead)
    messages, (layers, *_) = costs.sharded(engine, 1, DP, 1, 1, 1)
    block = layers[0].elements
    gradients = 4 * block
    whole = messages.work(layers[0]) - gradients
    assert whole == 2 * block * (1 + ahead)
    assert planned(costs, engine) + whole == pytest.approx(counted(costs, engine), rel=1e-3)


def test_state_in_host_memory_is_not_counted(costs: Costs) -> None:
    on_device = Fsdp2Config(gather="micro-batch")
    offloaded = replace(on_device, offload="cpu")
    assert planned(costs, offloaded) < planned(costs, on_device) / 2
