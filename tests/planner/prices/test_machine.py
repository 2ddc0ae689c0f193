"""Prices of operations in FP8: large products alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headrace.console.errors import PlanError
from headrace.dataplane.datasets.cache import default_folder
from headrace.models.accounting.memory import rank_shards
from headrace.models.accounting.state import Degrees
from headrace.models.accounting.stored import cache_folder
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS, Fp8Config
from headrace.planner.grid.split import Split
from headrace.planner.hardware import Hardware
from headrace.planner.prices.machine import Machine
from headrace.planner.prices.messages import price_layer
from headrace.planner.search.make import PlanRequest, build_machine, uniform_phase
from headrace.planner.traces.trace import trace_model
from headrace.planner.traces.work import Work
from headrace.trainer.run.config import RunConfig

LARGE = Work("matmul", "", (1, 4096, 8192, 8192), 1, 0)
HEAD = Work("matmul", "linear_cross_entropy", (1, 4096, 8192, 8192), 1, 0)
SMALL = Work("matmul", "", (1, 4096, 8192, 1024), 1, 0)
EXPERTS = Work("matmul", "", (8, 4096, 8192, 8192), 1, 0)
ATTENTION = Work("attention", "", (128, 16, 4096, 16), 1, 0)


@pytest.fixture(scope="module")
def machines() -> tuple[Machine, Machine]:
    hardware = Hardware.load("h200")
    return Machine(hardware, "bf16"), Machine(hardware, "fp8", fp8=Fp8Config())


def test_large_products_alone_run_in_fp8(machines: tuple[Machine, Machine]) -> None:
    bf16, fp8 = machines
    ratio = bf16.hardware.rate("matmul", m=1, k=1, n=1, precision="fp8")
    ratio = ratio / bf16.hardware.rate("matmul", m=1, k=1, n=1, precision="bf16")
    for work in (SMALL, HEAD, EXPERTS, ATTENTION):
        for direction in ("forward", "backward"):
            both = [m.seconds([work], direction, Split()) for m in (bf16, fp8)]  # type: ignore[arg-type]
            assert both[0] == both[1], work
    ahead = [m.seconds([LARGE], "forward", Split()) for m in (bf16, fp8)]
    back = [m.seconds([LARGE], "backward", Split()) for m in (bf16, fp8)]
    assert ahead[0] / ahead[1] == pytest.approx(ratio)
    # The gradients of weights, half of a backward pass, stay in bf16.
    assert back[1] == pytest.approx((ahead[0] + ahead[1]) / 2)


def test_shards_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cat of meta tensors imports torch._dynamo, which takes longer than most searches."""

    def imports(*_: object, **__: object) -> None:
        raise AssertionError("torch.cat")

    monkeypatch.setattr("torch.cat", imports)
    model = load_model_config("tiny-transformer")
    whole, half = (rank_shards(model, Degrees(tp=tp), 0) for tp in (1, 2))
    shapes = [sum(math.prod(shard.local) for shard in item.values()) for item in (whole, half)]
    assert shapes[0] > shapes[1] > shapes[0] / 2


def question(hardware: str, **fp8: str) -> PlanRequest:
    run = replace(RunConfig(), precision="fp8", fp8=Fp8Config(**fp8) if fp8 else None)  # type: ignore[arg-type]
    return PlanRequest(
        model=load_model_config("tiny-transformer"),
        run=run,
        hardware=Hardware.load(hardware),
        gpus=8,
        phases=[uniform_phase(4096, 64)],
    )


def test_fp8_needs_its_rate() -> None:
    machine = build_machine(question("a100-80"))
    with pytest.raises(PlanError, match=r"no rate of matmul \(precision fp8\)"):
        machine.seconds([LARGE], "forward", Split())


def test_small_products_are_slower_by_their_bytes_and_take_a_launch() -> None:
    """Negative control: the best shape's rate for each."""
    machine = Machine(Hardware.load("h100"), "bf16")

    def seconds(m: int) -> float:
        return machine.seconds([Work("matmul", "", (1, m, 4096, 4096), 1, 0)], "forward", Split())

    large, small = 2.0 * 16384 * 4096**2 / seconds(16384), 2.0 * 16 * 4096**2 / seconds(16)
    assert 5.5e14 < large < 7.92e14 * machine.attained.product
    assert small < large / 10
    assert machine.launches(1000) > 1e-3
    assert machine.host(1000) == 0  # while the device computes


def test_extrapolated_sizes_are_those_of_the_layout_alone() -> None:
    machine = Machine(Hardware.load("h100"), "bf16")
    work = Work("attention", "", (128, 16, 131_072, 16), 1, 0)
    machine.seconds([work], "forward", Split())
    assert machine.outside == {"attention": "length 131,072, measured at 512 to 16,384"}
    renewed = machine.renew()
    assert renewed.outside == {}
    renewed.seconds([replace(work, shape=(128, 16, 8192, 16))], "forward", Split())
    assert renewed.outside == {} and machine.outside


def test_fp8_of_some_operators_cannot_be_planned() -> None:
    with pytest.raises(PlanError, match="matrices=hyena cannot be planned"):
        build_machine(question("h200", matrices="hyena"))


@pytest.mark.parametrize(("ranks", "stride", "far"), [(8, 1, 0), (4, 4, 1), (16, 1, 1), (4, 8, 3)])
def test_rings_cross_the_network_where_they_leave_a_node(ranks: int, stride: int, far: int) -> None:
    machine = Machine(Hardware.load("h100"), "bf16")
    assert machine.per_node == 8
    near, network = machine.hop(1e8, 1), machine.hop(1e8, 8)
    assert near < network
    assert machine.ring_hop(1e8, ranks, stride) == (network if far else near)
    passed = far * network + (ranks - 1 - far) * near
    assert machine.chain(1e8, ranks, stride) == pytest.approx(passed)


def test_merged_operations_send_a_message_each() -> None:
    machine, model = Machine(Hardware.load("h100"), "bf16"), load_model_config("tiny-hybrid")
    split = Split(cp=2)
    convolution = Work("kernel", "short_convolution", (3, 64, 64), 1, 0)
    layer = replace(
        trace_model(model, 64, PRECISIONS["bf16"], "cuda").kinds[0], forward=(convolution,)
    )
    three = replace(layer, forward=(replace(convolution, count=3),))
    whole = trace_model(model, 64, PRECISIONS["bf16"], "cuda")
    seconds = [
        price_layer(item, model, whole, PRECISIONS["bf16"], machine, split, 1, {})["context"]
        for item in (layer, three)
    ]
    assert seconds[1] == pytest.approx([3 * item for item in seconds[0]])


def test_traces_lie_outside_the_cache_of_chunks() -> None:
    """That cache refuses a folder that holds other files."""
    assert not cache_folder().is_relative_to(default_folder())
