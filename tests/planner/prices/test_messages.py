"""Messages of layers, and a rank's own work around them: those of the code that runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.models.config.config import load_model_config
from headrace.models.config.options.mla import MLAOptions
from headrace.models.config.options.precision import PRECISIONS, Fp8Config
from headrace.models.model.embedding import EmbeddingTable, Unembedding
from headrace.models.parallel.axes import Axis
from headrace.models.parallel.exchange import gather_rows, scatter_rows
from headrace.models.parallel.heads import gather_rows_of_heads, scatter_rows_of_heads
from headrace.models.parallel.local_shard import LocalShard
from headrace.models.parallel.tensor import gather, scatter
from headrace.planner.grid.grid import Grid, LayoutShape, enumerate_engines, list_settings
from headrace.planner.grid.split import Split
from headrace.planner.hardware import Hardware
from headrace.planner.prices.machine import Machine
from headrace.planner.prices.messages import (
    EngineMessages,
    MessageTimes,
    ParameterCosts,
    price_layer,
)
from headrace.planner.traces.recorder import OperationRecorder
from headrace.planner.traces.ring import Operations
from headrace.planner.traces.trace import ModelTrace, trace_model
from headrace.planner.traces.work import Work
from headrace.trainer.engines.config import EngineConfig
from headrace.trainer.engines.deepspeed import DeepSpeedConfig
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.traffic import MESSAGES
from headrace.trainer.layout.config import LayoutConfig

FP32, BF16 = PRECISIONS["fp32"], PRECISIONS["bf16"]
LENGTH, WIDTH, HEADS, KV_HEADS, RANKS = 64, 128, 4, 2, 2
"""Those of `tiny-transformer`, on two ranks."""
AXIS = Axis(None, 0, RANKS)


@pytest.fixture(scope="module")
def traced() -> ModelTrace:
    return trace_model(load_model_config("tiny-transformer"), LENGTH, FP32, "cuda")


@dataclass
class Copies(Machine):
    """Prices a copied byte at one second, and nothing else."""

    def __post_init__(self) -> None:
        super().__init__(Hardware.load("h100"), "fp32")

    def traffic(self, size: float) -> float:
        return size

    def launches(self, count: float) -> float:
        return 0.0

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        return 0.0


def priced(traced: ModelTrace, split: Split, machine: Machine, axis: str) -> MessageTimes:
    model = load_model_config("tiny-transformer")
    return price_layer(traced.kinds[0], model, traced, FP32, machine, split, 1, {})[axis]


def copied(run: Callable[..., Any], *shapes: Sequence[int]) -> int:
    """Return the bytes that a forward pass reads and writes."""
    with torch.device("meta"):
        inputs = [torch.empty(shape) for shape in shapes]
    with OperationRecorder(LENGTH) as recorder:
        run(*inputs)
    return sum(work.bytes for work in recorder.work)


@pytest.mark.parametrize("rows", [1, 3])
def test_copies_around_messages_are_those_of_the_code(traced: ModelTrace, rows: int) -> None:
    part, head = LENGTH // RANKS, WIDTH // HEADS
    tensor = copied(lambda x: gather(x, AXIS), (rows, part, WIDTH))
    tensor += copied(lambda x: scatter(x, AXIS), (rows, LENGTH, WIDTH))
    calls = traced.kinds[0].calls
    result = priced(traced, Split(rows=rows, tp=RANKS), Copies(), "tensor")
    assert result.forward == calls * tensor
    assert (tensor > 0) == (rows > 1)

    keys = rows, part, KV_HEADS, head
    context = copied(
        lambda q, k, v: gather_rows_of_heads(q, k, v, AXIS), (rows, part, HEADS, head), keys, keys
    )
    context += copied(
        lambda y: scatter_rows_of_heads(y, AXIS), (rows, LENGTH, HEADS // RANKS, head)
    )
    result = priced(traced, Split(rows=rows, cp=RANKS), Copies(), "context")
    assert result.forward == context


@pytest.mark.parametrize("rows", [1, 3])
def test_messages_and_copies_of_latents_are_those_of_the_code(rows: int) -> None:
    """Negative control: latents wider than keys and values stay where they are."""
    model = load_model_config("tiny-deepseek")
    options = model.operators["mla"]
    assert isinstance(options, MLAOptions)
    trace = trace_model(model, LENGTH, FP32, "cuda")
    split, part, heads = Split(rows=rows, cp=RANKS), LENGTH // RANKS, options.heads
    counts = [heads // RANKS] * RANKS
    latent = rows, part, options.kv_lora_rank
    key = rows, part, options.qk_rope_head_dim
    context = copied(
        lambda q: gather_rows(q, counts, AXIS), (rows, part, heads, options.qk_head_dim)
    )
    context += copied(lambda c, r: gather(torch.cat([c, r], dim=-1), AXIS), latent, key)
    context += copied(
        lambda y: scatter_rows_of_heads(y, AXIS),
        (rows, LENGTH, heads // RANKS, options.v_head_dim),
    )
    layer = trace.kinds[0]
    result = price_layer(layer, model, trace, FP32, Copies(), split, 1, {})["context"]
    assert result.forward == context
    asked, number = Asked(), FP32.weight_bytes * rows * part
    price_layer(layer, model, trace, FP32, asked, split, 1, {})
    gathered = RANKS * options.latent_width * number
    assert asked.sent == {
        ("all-to-all", heads * options.qk_head_dim * number): 1,
        ("all-to-all", heads * options.v_head_dim * number): 1,
        ("all-gather", gathered): 1,
        ("reduce-scatter", gathered): 1,
    }
    operators = {**model.operators, "mla": replace(options, kv_lora_rank=400)}
    wide, asked = replace(model, operators=operators), Asked()
    price_layer(layer, wide, trace, FP32, asked, split, 1, {})
    assert asked.sent == {
        ("all-to-all", 3 * heads * options.head_dim * number): 1,
        ("all-to-all", heads * options.head_dim * number): 1,
    }


@pytest.mark.parametrize("rows", [1, 3])
def test_copies_around_a_long_convolution_are_those_of_the_code(
    traced: ModelTrace, rows: int
) -> None:
    channels = [WIDTH // RANKS] * RANKS
    both = copied(lambda x: gather_rows(x, channels, AXIS), (rows, LENGTH // RANKS, WIDTH))
    both += copied(lambda y: scatter_rows(y, channels, AXIS), (rows, LENGTH, WIDTH // RANKS))
    work = Work("kernel", "fft_convolution", (LENGTH, WIDTH, LENGTH), 1, 0)
    layer = replace(traced.kinds[0], forward=(work,))
    of_convolution = replace(traced, kinds=(layer,))
    result = priced(of_convolution, Split(rows=rows, cp=RANKS), Copies(), "context")
    assert result.forward == both


class Messages(TorchDispatchMode):
    """Counts messages by their kind and bytes, as a hardware file does."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), options: Any = None
    ) -> Any:
        result = operation(*inputs, **(options or {}))
        kinds = {
            "_c10d_functional::all_gather_into_tensor": "all-gather",
            "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
            "_c10d_functional::all_reduce": "all-reduce",
        }
        if (kind := kinds.get(operation._schema.name)) is not None:
            whole: Tensor = result if kind == "all-gather" else inputs[0]
            self.sent[kind, whole.nbytes] += 1
        return result


def test_a_ring_sends_latents() -> None:
    """In FP8 too; keys and values where these are fewer numbers."""
    in_fp8 = replace(FP32, fp8=Fp8Config(smallest=16))
    for precision, rank in ((FP32, 64), (in_fp8, 64), (FP32, 1024)):
        model = load_model_config("tiny-deepseek", [f"operators.mla.kv_lora_rank={rank}"])
        options = model.operators["mla"]
        assert isinstance(options, MLAOptions)
        trace = trace_model(model, LENGTH, FP32, "cuda")
        split, layer = Split(cp=RANKS, attention="ring"), trace.kinds[0]
        attention = [work for work in layer.forward if work.kind == "attention"]
        number, queries = FP32.weight_bytes * LENGTH // RANKS, options.heads * options.head_dim
        asked, rings = Asked(), {work.shape: Operations((), ()) for work in attention}
        price_layer(layer, model, trace, precision, asked, split, 1, rings)
        sent, output = options.latent_width, options.v_head_dim
        if rank == 1024:
            sent, output = 2 * queries, options.head_dim
        inputs = queries + sent
        assert asked.sent == {
            ("all-to-all", inputs * number): 1,
            ("all-to-all", options.heads * output * number): 1,
            ("hop", sent * number): 2,  # the gradients are as many numbers, in fp32
        }


@dataclass
class Asked(Copies):
    """Counts the messages that it prices; it prices nothing."""

    sent: Counter[tuple[str, int]] = field(default_factory=Counter)

    def traffic(self, size: float) -> float:
        return 0.0

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        self.sent[name, int(size)] += 1
        return 0.0

    def ring_hop(self, size: float, ranks: int, stride: int) -> float:
        return self.collective("hop", size, ranks, stride)


def test_messages_of_a_sharded_loss_are_those_of_the_code() -> None:
    """Each row sends its own. Beside them, the stream is gathered for the logits, and its gradient
    is scattered; the price has the embedding's messages here too."""
    with torch.device("meta"):
        head = Unembedding(EmbeddingTable(512, WIDTH), "torch")
        head.table.weight = torch.nn.Parameter(torch.empty(512 // RANKS, WIDTH))
        hidden = torch.empty(3, LENGTH // RANKS, WIDTH, requires_grad=True)
        targets, weights = torch.zeros(3, LENGTH, dtype=torch.int64), torch.ones(3, LENGTH)
    with Messages() as ran:
        loss, _ = head.loss(hidden, targets, weights, 0.0, AXIS)
        loss.backward()
    machine, model = Asked(), load_model_config("tiny-transformer")
    plain = trace_model(model, LENGTH, FP32, "cpu")
    split = Split(rows=3, tp=RANKS)
    price_layer(plain.head, model, plain, FP32, machine, split, 1, {})
    stream = 3 * LENGTH * WIDTH * 4
    asked = {name: number for name, number in machine.sent.items() if name[1] != stream}
    small = {name: number for name, number in ran.sent.items() if name[1] != stream}
    assert small == {name: 3 * number for name, number in asked.items()}
    assert ran.sent["all-gather", stream] == ran.sent["reduce-scatter", stream] == 1
    assert machine.sent["all-gather", stream] == 1  # asked once, for both passes


def test_a_group_that_fills_a_node_shares_its_processor() -> None:
    """Where both take the sum of their times, no message of a node's ranks is free."""
    hardware = Hardware.load("h100")
    turns = replace(hardware.file.overlap["node"], compute=2.0, communication=2.0)
    hidden = replace(turns, compute=1.0, communication=1.0)
    file = replace(hardware.file, overlap={"node": turns, "network": hidden})
    machine = Machine(Hardware(file, "here.yaml"), "fp32")

    def price_overlap(dp: int, tp: int) -> float:
        layout = LayoutConfig(tp=tp)
        engine = EngineMessages(Fsdp2Config(), layout, dp, FP32, machine, 1e6)
        return engine.overlap(1.0, 0.25)

    node = machine.per_node
    assert price_overlap(node, 1) == price_overlap(node // 2, 2) == pytest.approx(1.25)
    assert price_overlap(2 * node, 1) == price_overlap(node, 2) == pytest.approx(1.0)


def test_layers_of_zero_share_messages() -> None:
    """As many layers as a bucket has take the time of one message; FSDP2 sends one for each."""
    machine = Machine(Hardware.load("h100"), "fp32")
    layer = {"weight": LocalShard((1000,))}

    def seconds(engine: EngineConfig, layers: int) -> tuple[float, float]:
        parts = EngineMessages(engine, LayoutConfig(), 8, FP32, machine, 1000 * layers).price(layer)
        return layers * parts.seconds["gather"], layers * parts.seconds["all_reduce"]

    whole = [machine.collective(name, 50_000 * 4, 8, 1) for name in ("all-gather", "all-reduce")]
    single = [machine.collective(name, 1000 * 4, 8, 1) for name in ("all-gather", "all-reduce")]
    assert seconds(DeepSpeedConfig(zero=1), 50) == pytest.approx(whole)
    assert seconds(Fsdp2Config(), 50) == pytest.approx([50 * item for item in single])
    assert whole[0] < 50 * single[0]
    small = DeepSpeedConfig(zero=1, reduce_bucket_size=10_000)
    bucket = machine.collective("all-reduce", 10_000 * 4, 8, 1)
    assert seconds(small, 50)[1] == pytest.approx(5 * bucket)


def test_one_rank_gathers_and_launches_nothing() -> None:
    """Plans try what a run keeps apart: an engine that sends nothing and needs no host, and FSDP2
    by block, whose messages are copies, in no pass's shadow."""

    class Launches(Copies):
        def host(self, launches: float) -> float:
            return launches

    def fsdp2(dp: int) -> list[Grid]:
        shape = LayoutShape(LayoutConfig(), dp, 1, 1)
        engines = enumerate_engines(shape, per_node=8)
        on_device = (e for e in engines if not e.offloads)
        return [Grid(shape, e, shape.layout) for e in on_device if e.kind == "fsdp2" or dp == 1]

    def messages(grid: Grid) -> EngineMessages:
        arguments = (grid.engine, grid.layout, grid.shape.dp, BF16, Launches(), 1.0)
        return EngineMessages(*arguments)

    def host_launches(grid: Grid) -> float:
        costs = ParameterCosts(0.0, 0.0, dict.fromkeys(MESSAGES, 0.0))
        return messages(grid).forward(0.0, costs)

    (alone, by_block), several = fsdp2(1), fsdp2(2)
    assert host_launches(alone) == 0 < host_launches(by_block)
    assert all(host_launches(grid) > 0 for grid in several)
    layer = {"weight": LocalShard((1000,))}
    costs = messages(by_block).price(layer)
    assert (costs.seconds["gather"], costs.seconds["reduce"]) == (10_000, 14_000)
    assert messages(by_block).forward(1e9, costs) == 1e9 + host_launches(by_block) + 10_000
    assert messages(several[0]).price(layer).seconds["gather"] == 0  # `Copies` sends for nothing
    assert {grid.settings()["gather"] for grid in several} == {"block", "micro-batch", "step"}
    assert [grid.settings()["gather"] for grid in (alone, by_block)] == ["step", "block"]
    assert "one rank" in alone.name() and "FSDP2" not in alone.name()
    assert "FSDP2, gather by block" in by_block.name()
    assert {"gather", "shard", "zero"} <= set(list_settings())
