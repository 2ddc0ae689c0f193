"""A trace has the operations that `models show` counts, all of them have a price, and none is
faster than a device's peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from headrace.models.accounting import count
from headrace.models.config.config import ModelConfig, list_shipped_models, load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.planner.grid.split import Split
from headrace.planner.hardware import Hardware
from headrace.planner.measure.kernels import KERNELS
from headrace.planner.modules.model import count_flops
from headrace.planner.prices.layers import Costs
from headrace.planner.prices.machine import MEMORY_BOUND, Machine
from headrace.planner.search.make import uniform_phase
from headrace.planner.traces.trace import ModelTrace, trace_model
from headrace.planner.traces.work import Work
from headrace.trainer.run.config import RunConfig

LENGTH = 1024
SMALL = ("tiny-hybrid", "tiny-moe", "tiny-transformer", "tiny-zamba")
PLAIN = 0.2
"""Products of operators in plain torch (chunks, filters) beyond those of their matrices, at most,
in multiples of these."""


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(
    scope="module",
    params=[SMALL, pytest.param(tuple(list_shipped_models()), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def traces(request: pytest.FixtureRequest) -> dict[str, tuple[ModelConfig, ModelTrace]]:
    models = {name: load_model_config(name) for name in request.param}
    bf16 = PRECISIONS["bf16"]
    return {
        name: (model, trace_model(model, LENGTH, bf16, "cuda")) for name, model in models.items()
    }


def count_products(operations: tuple[Work, ...]) -> float:
    return count_flops(tuple(work for work in operations if work.kind == "matmul"))


def counted_products(config: ModelConfig) -> tuple[list[float], float]:
    """Return the FLOPs of matrix products by layer and of the head, in a forward pass."""
    model, layers = count.build_meta(config), []
    for layer, block in zip(config.layers, model.typed_blocks(), strict=True):
        flops = 0.0 if block.call is None else count.matrix_flops(block.call)
        branches = [branch.operator for branch in block.branches()]
        for operator in filter(None, [model.shared_block(layer), *branches]):
            flops += count.matrix_flops(operator)
            for computation, more in operator.flops(LENGTH).items():
                if count.KINDS.get(computation, computation) == "matmul":
                    flops += more
        layers.append(flops * LENGTH)
    return layers, count.head_flops(model) * LENGTH


def test_products_are_those_that_models_show_counts(
    traces: Mapping[str, tuple[ModelConfig, ModelTrace]],
) -> None:
    for name, (config, trace) in traces.items():
        layers, head = counted_products(config)
        for flops, number in zip(layers, trace.layers, strict=True):
            kind = trace.kinds[number]
            for passes, operations in ((1, kind.forward), (2, kind.backward)):
                ratio = count_products(operations) / (passes * flops)
                assert 1 <= ratio < 1 + PLAIN, (name, kind.name, passes)
        both = trace.head.forward + trace.head.backward
        assert count_products(both) == pytest.approx(3 * head), name


def test_all_kernels_are_measured_or_move_bytes_alone(
    traces: Mapping[str, tuple[ModelConfig, ModelTrace]],
) -> None:
    """`trainer profile` writes the rows that `trainer plan` asks for."""
    for name, (_, trace) in traces.items():
        for kind in (*trace.kinds, trace.head):
            kernels = {work.name for work in kind.forward + kind.backward if work.kind == "kernel"}
            assert kernels <= {*KERNELS, *MEMORY_BOUND}, (name, kind.name)


def test_no_layer_exceeds_the_peak(
    traces: Mapping[str, tuple[ModelConfig, ModelTrace]],
) -> None:
    """Alone, with tensor and context ranks, and with split experts."""
    hardware = Hardware.load("h100")
    peak = max(row.rate for row in hardware.file.peaks if row.precision == "bf16")
    for name, (config, _) in traces.items():
        machine = Machine(hardware, "bf16", roofline=True)
        run = RunConfig(precision="bf16")
        costs = Costs(config, run, machine, uniform_phase(LENGTH, 8))
        for split, ep in ((Split(), 1), (Split(4, 2, 2), 1), (Split(4, 1, 2), 2)):
            passes, _ = costs.passes(split, ep)
            for kind, times in zip(costs.kinds, passes, strict=True):
                flops = count_flops(kind.forward + kind.backward) * split.rows / split.ranks
                seconds = times.forward_seconds + times.backward_seconds
                assert flops <= peak * seconds, (name, kind.name, split)
