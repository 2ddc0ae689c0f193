"""Operations of ring attention: those of the code that runs, and their price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from headrace.models.config.config import load_model_config
from headrace.models.config.options.mla import MLAOptions
from headrace.models.config.options.precision import PRECISIONS
from headrace.planner.grid.split import Split
from headrace.planner.hardware import Hardware
from headrace.planner.hardware.file import KernelRate
from headrace.planner.prices import rings
from headrace.planner.prices.machine import RING, Machine
from headrace.planner.traces import ring as traces
from headrace.planner.traces.recorder import OperationRecorder
from headrace.planner.traces.ring import Operations, Ring, trace_expansion, trace_ring
from headrace.planner.traces.trace import trace_model
from headrace.planner.traces.work import Work

FP32 = PRECISIONS["fp32"]
TILES = Ring(
    heads=4, kv_heads=2, width=32, window=None, rank_tokens=1536, precision=FP32, device="cpu"
)
FUSED = replace(TILES, precision=PRECISIONS["bf16"], device="cuda")


@pytest.fixture(autouse=True)
def not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "load_or_compute", lambda question, make, *_: make())
    trace_ring.cache_clear()


def flops(work: tuple[Work, ...]) -> float:
    """Operations of matrix products, or of fused attention."""
    products = [2 * item.count * g * m * k * n for item in work if item.kind == "matmul"
                for g, m, k, n in [item.shape]]  # fmt: skip
    calls = [2 * item.count * length**2 * heads * width for item in work if item.kind == "attention"
             for width, heads, length, _ in [item.shape]]  # fmt: skip
    return sum(products) + sum(calls)


def numbers(work: tuple[Work, ...]) -> Counter[tuple[object, ...]]:
    """Counts and bytes of operations of one kind."""
    result: Counter[tuple[object, ...]] = Counter()
    for operation in work:
        result[operation.kind, operation.shape, operation.saved] += operation.count
        result[operation.kind, operation.shape, operation.saved, "bytes"] += (
            operation.count * operation.bytes
        )
    return result


def test_a_tile_of_each_size_stands_for_all() -> None:
    @contextmanager
    def every_tile(recorder: OperationRecorder, ring: Ring) -> Iterator[None]:
        yield

    result = trace_ring(TILES, 3)
    with mock.patch.object(traces, "_run_one_tile_per_size", every_tile):
        whole = traces._record_ring(TILES, 3)
    for some, every in ((result.forward, whole.forward), (result.backward, whole.backward)):
        assert numbers(tuple(w for w in some if w.kind != "pairs")) == numbers(every)
    [pairs] = [work for work in result.forward if work.kind == "pairs"]
    assert flops(result.forward) == 4 * TILES.heads * TILES.width * pairs.count
    # Each rank computes its causal pairs, and those above the diagonal of its 6 last tiles.
    assert pairs.count == TILES.rank_tokens**2 * 3 / 2 + 6 * 256**2 / 2


@pytest.mark.parametrize(
    "ring", [replace(TILES, rank_tokens=512), replace(FUSED, rank_tokens=1024)]
)
def test_a_long_ring_follows_from_short_ones(ring: Ring) -> None:
    result, real = trace_ring(ring, 7), traces._record_ring(ring, 7)
    for predicted, recorded in ((result.forward, real.forward), (result.backward, real.backward)):
        assert flops(predicted) == pytest.approx(flops(recorded), rel=1e-3)
        # The exchange of chunks has a few operations more or less.
        for kind, near in (("memory", 2e-3), ("launch", 0.1)):
            sums = [sum(w.count * max(w.bytes, 1) for w in item if w.kind == kind)
                    for item in (predicted, recorded)]  # fmt: skip
            assert sums[0] == pytest.approx(sums[1], rel=near)
    assert result.tiled == (ring.device == "cpu")


def test_hops_of_fused_attention_are_as_many_causal_pairs() -> None:
    """A rank of N has the N-th part of the pairs of a causal row."""
    row = 4 * FUSED.rank_tokens
    whole = 2 * row**2 * FUSED.heads * FUSED.width
    assert flops(trace_ring(FUSED, 4).forward) == pytest.approx(whole / 4, rel=1e-3)


def test_kept_attention_leaves_the_exchange_of_chunks_alone() -> None:
    for ring in (TILES, FUSED):
        again = [work for work in trace_ring(ring, 2).forward if work.saved != "attention"]
        assert {work.kind for work in again} == {"memory", "launch"}


def test_latents_are_expanded_on_arrival() -> None:
    """Beside the layer's own, a ring of four expands three in the forward pass; four in the
    backward pass, and the gradients of three."""
    options = MLAOptions(
        heads=4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
    )
    expansion = trace_expansion(options, 64, FP32)
    product = 2 * 64 * 24 * 4 * (16 + 16)
    assert flops(expansion.forward) == product and flops(expansion.backward) == 2 * product
    ring = rings.add_expansions(Operations((), ()), expansion, 4)
    assert flops(ring.forward) == 3 * product
    assert flops(ring.backward) == (4 + 2 * 3) * product


def test_a_measured_ring_is_priced_by_its_pairs() -> None:
    hardware = Hardware.load("h100")
    source = next(iter(hardware.file.sources))
    at = {"kernel": RING, "width": 128, "length": 1536, "size": 32, "precision": "fp32"}
    row = KernelRate(**at, direction="forward", rate=1e9, source=source)  # type: ignore[arg-type]
    file = replace(hardware.file, kernels=(row,))
    machine = Machine(Hardware(file, "here.yaml"), "fp32")
    assert machine.has_kernel(RING) and not Machine(hardware, "fp32").has_kernel(RING)
    result: Operations = rings.select_priced(trace_ring(TILES, 2), measured=True)
    [pairs] = result.forward
    seconds = machine.seconds(result.forward, "forward", Split())
    assert seconds == pytest.approx(pairs.count * 128 / 1e9)


def test_rows_and_tensor_ranks_share_a_rings_operations() -> None:
    model = load_model_config("tiny-transformer")
    layer = trace_model(model, 3072, FP32, "cpu").kinds[0]
    machine = Machine(Hardware.load("h100"), "fp32")
    kind = mock.patch.object(rings, "trace_ring", lambda ring, ranks: trace_ring(TILES, 2))

    def forward_work(**split: int) -> tuple[Work, ...]:
        asked = Split(cp=2, attention="ring", **split)  # type: ignore[arg-type]
        result = rings.compute_rings(layer, model, 3072, FP32, machine, asked)
        [ring] = result.values()
        return ring.forward

    with kind:
        assert flops(forward_work(rows=2)) == 2 * flops(forward_work())
        assert (
            flops(forward_work(tp=2))
            == flops(forward_work(rows=2, tp=4))
            == flops(forward_work()) / 2
        )
        a2a = Split(cp=2)
        assert not rings.compute_rings(layer, model, 3072, FP32, machine, a2a)
