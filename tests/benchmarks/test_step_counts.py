"""Counts of a training step on a fake GPU, and the reads that make the host wait for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks._fake_gpu import Launch
from benchmarks._launch_kinds import kind_of
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.kernels.linear_cross_entropy import chunk_layout, workspace_bytes

ROOT = Path(__file__).parents[2]
TOKENS = 1024
MODELS = ("tiny-transformer", "tiny-hybrid", "tiny-mamba", "tiny-moe")
RECOMPUTED = ("tiny-hybrid", "tiny-mamba")
LOSSES = ((2048, 64, 5003, "bfloat16"), (4096, 64, 301, "bfloat16"), (1000, 16, 640, "float32"))
"""Tokens, width, vocabulary and type of losses."""
SCRIPT = """
import json, torch
from collections import Counter
from benchmarks._fake_gpu import fake_gpu
from benchmarks.step_counts import count_step, kind_of
from headrace.models.config.config import load_model_config
from headrace.models.documents import Documents
from headrace.models.layers.gated_convolution import gated_convolution
from headrace.models.layers.grouped import group_ends, grouped_outer, grouped_product
from headrace.models.kernels.linear_cross_entropy import linear_cross_entropy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
class Peak(TorchDispatchMode):
    # Bytes of the storages that operations create, at most at a time.
    def __init__(self, inputs):
        super().__init__()
        self.inputs = {{each.untyped_storage()._cdata for each in inputs}}  # seen by views
        self.live, self.bytes = {{}}, 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {{}}))
        for each in [result] if isinstance(result, torch.Tensor) else []:
            storage = each.untyped_storage()
            if storage._cdata not in self.inputs:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        alive = [size for reference, size in self.live.values() if not reference.expired()]
        self.bytes = max(self.bytes, sum(alive))
        return result
for name in {models!r}:
    counts = count_step(load_model_config(name), {tokens}, [0, 100, 101, 640, {tokens}])
    kinds = {{kind: counts.bytes(kind) for kind in map(kind_of, counts.launches)}}
    waits = [(wait.name, wait.place) for wait in counts.waits]
    names = Counter(each.name for each in counts.launches)
    sums = [
        each.place for each in counts.launches
        if each.name == "aten::add.Tensor" and each.place.startswith("backward")
    ]
    again = {{}}
    if name in {recomputed!r}:
        again = count_step(load_model_config(name), {tokens}, [0, {tokens}], recompute="block")
        again = Counter(each.name for each in again.launches)
    print(json.dumps([name, counts.gemm_flops, kinds, waits, counts.saved, sums, again, names]))
with fake_gpu() as gpu:
    x, host = torch.zeros(3, device="cuda"), torch.zeros(3)
    host.to("cuda", non_blocking=True), x.to("cpu", non_blocking=True), x.sum(), host.sum().item()
    quiet = len(gpu.waits)
    x.sum().item(), x.cpu(), x.tolist(), bool(x.any()), host.copy_(x), torch.equal(x, x)
    host.to("cuda"), x.copy_(host)
    torch.cuda.synchronize()
    reads = [wait.name for wait in gpu.waits]
    try:
        x.nonzero()
    except Exception as error:
        reads.append(type(error).__name__)
    gpu.clear()  # a MoE in fp32: its products are loops over groups
    x, weights, counts = (torch.zeros(*shape, device="cuda") for shape in ((7, 8), (2, 8, 8), (2,)))
    for layer in range(3):
        where = group_ends(counts.long(), x, weights, weights).device.type
        ends = torch.tensor([3, 7])  # values that a fake tensor does not have
        grouped_product(grouped_product(x, weights, ends), weights, ends)
        grouped_outer(x, x, ends)
    loops = [where, [wait.name for wait in gpu.waits]]
    gpu.clear()  # free filters over packed rows
    documents = Documents.build(torch.tensor([0, 100, 640]), (1, 640)).to(x.device)
    x, taps = (torch.zeros(*shape, device="cuda") for shape in ((1, 640, 24), (8, 300)))
    y = gated_convolution(x, taps, documents, gated=True)
    torch.ops.headrace.fft_convolution_backward(y, x, taps, None, documents.host.positions, True)
    names = Counter(launch.name for launch in gpu.launches)
    filters = [names["triton::fft_convolution_gather"], [wait.name for wait in gpu.waits]]
    sizes = []
    for tokens, width, ids, dtype in {losses!r}:
        hidden, weight = (
            torch.zeros(n, width, device="cuda", dtype=getattr(torch, dtype)) for n in (tokens, ids)
        )
        ones = torch.ones(tokens, device="cuda")
        given = hidden, weight, ones.long(), ones
        with Peak(given) as peak:
            linear_cross_entropy.function(*given, 0.0, True, ids, "")
        sizes.append(peak.bytes)
print(json.dumps([quiet, reads, loops, filters, sizes]))
"""


def counted(models: tuple[str, ...]) -> list[list[Any]]:
    """Count steps in another process, whose process groups and device are fake."""
    code = SCRIPT.format(models=models, recomputed=RECOMPUTED, tokens=TOKENS, losses=LOSSES)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def layers_of(name: str, mixer: str) -> int:
    return sum(layer.mixer == mixer for layer in load_model_config(name).layers)


@pytest.fixture(scope="session")
def steps() -> list[list[Any]]:
    return counted(MODELS)


@pytest.mark.slow
def test_the_host_waits_once_in_a_step(steps: list[list[Any]]) -> None:
    for _, _, _, waits, *_ in steps[:-1]:
        assert [name for name, _ in waits] == ["synchronize"]
        assert re.fullmatch(r"trainer/loop/step_stats\.py:\d+ wait", waits[0][1]), waits


@pytest.mark.slow
def test_every_read_of_the_device_is_a_wait(steps: list[list[Any]]) -> None:
    """Negative control: each form of a read is seen, and copies that do not wait are none."""
    quiet, reads, *_ = steps[-1]
    assert quiet == 0
    scalar, copy = "aten::_local_scalar_dense", "aten::_to_copy"
    assert reads == [
        *(scalar, copy, *[scalar] * 3, scalar, "aten::copy_", "aten::equal"),
        *(copy, "aten::copy_", "synchronize"),
        "DynamicOutputShapeException",
    ]


@pytest.mark.slow
def test_packed_attention_is_one_call_in_a_layer(steps: list[list[Any]]) -> None:
    for name, *_, launches in steps[: MODELS.index("tiny-moe")]:
        layers = layers_of(name, "attention")
        for call in ("_varlen_attn", "_varlen_attn_backward"):
            assert launches.get(f"torch_attn::{call}", 0) == layers
        assert not [launch for launch in launches if "index" in launch or "product" in launch]


@pytest.mark.slow
def test_loops_over_experts_wait_once_in_a_layer(steps: list[list[Any]]) -> None:
    _, _, loops, *_ = steps[-1]
    assert loops == ["cpu", ["aten::_to_copy"] * 3]


@pytest.mark.slow
def test_free_filters_do_not_wait_for_the_documents(steps: list[list[Any]]) -> None:
    """Two sizes of transforms, which the host knows before it launches them."""
    *_, filters, _ = steps[-1]
    assert filters == [2, []]


@pytest.mark.slow
def test_the_accounting_knows_the_memory_of_the_loss(steps: list[list[Any]]) -> None:
    """Its kernel holds the gradients, and one chunk of logits before the rounded gradient, and a
    few numbers for each token."""
    for (tokens, width, ids, name), allocated in zip(LOSSES, steps[-1][-1], strict=True):
        dtype = getattr(torch, name)
        few = allocated - workspace_bytes(tokens, width, ids, dtype)
        assert 0 < few < 50 * tokens
        assert 50 * tokens < chunk_layout(tokens, width, ids, dtype)[0] * ids * dtype.itemsize


@pytest.mark.slow
def test_products_of_experts_are_six_launches_in_a_layer(steps: list[list[Any]]) -> None:
    """Two products forward, and two for each of them backward, with one kernel between them."""
    launches, layers = steps[MODELS.index("tiny-moe")][-1], layers_of("tiny-moe", "moe")
    assert launches["aten::_grouped_mm"] == 6 * layers > 0
    assert launches["triton::glu_forward"] == launches["triton::glu_backward"] == layers


@pytest.mark.slow
def test_rows_of_experts_move_in_four_launches_in_a_layer(steps: list[list[Any]]) -> None:
    """There and back, forward and backward; nothing is scattered or indexed beside them."""
    launches, layers = steps[MODELS.index("tiny-moe")][-1], layers_of("tiny-moe", "moe")
    moves = ("triton::routed_rows_dispatch", "triton::routed_rows_combine")
    assert [launches[name] for name in moves] == [2 * layers, 2 * layers]
    assert not [name for name in launches if "index" in name]


@pytest.mark.slow
def test_gradients_are_joined_inside_products_and_norms(steps: list[list[Any]]) -> None:
    """Gradients of the parts of a projection, and of two readers of the residual stream. One
    concatenation is left, of what the host reads, and one sum, for the tied embedding."""
    result = {name: (sums, launches) for name, *_, sums, _, launches in steps[:-1]}
    routers = ["backward: AddmmBackward0"] * layers_of("tiny-moe", "moe")
    for name, router_sums in (("tiny-transformer", []), ("tiny-moe", routers)):
        sums, launches = result[name]
        assert launches["aten::cat"] == 1, name
        assert sorted(sums) == [*router_sums, "backward: EmbeddingBackward0"], name


@pytest.mark.slow
@pytest.mark.parametrize("config_name", ["tiny-transformer", "tiny-moe"])
def test_gemm_flops_are_those_of_the_weights(steps: list[list[Any]], config_name: str) -> None:
    config = load_model_config(config_name)
    model = build_meta(config)
    weights = [weight for name, weight in model.named_parameters() if not name.endswith("taps")]
    matrices = sum(weight.numel() for weight in weights if weight.dim() > 1)
    if config.tie_embeddings is False:
        matrices -= config.vocab_size * config.width  # rows of the embedding are gathered
    operators = [branch.operator for block in model.typed_blocks() for branch in block.branches()]
    matrices -= sum(operator.unused_parameters() for operator in operators)
    [flops] = [flops for name, flops, *_ in steps[:-1] if name == config_name]
    assert flops == 6 * TOKENS * matrices


@pytest.mark.slow
def test_every_kind_is_counted(steps: list[list[Any]]) -> None:
    for name, _, kinds, _, saved, *_ in steps[:-1]:
        attends = layers_of(name, "attention") > 0
        assert set(kinds) - {"attention"} == {"GEMM", "kernel", "glue", "engine"}
        assert ("attention" in kinds) == attends and saved > 0


@pytest.mark.slow
def test_recompute_runs_each_kernel_again(steps: list[list[Any]]) -> None:
    """Recompute lets a backward pass read its saved tensors once."""
    for name, *_, again, launches in steps[:-1]:
        if name not in RECOMPUTED:
            continue
        kernels = {launch for launch in launches if launch.startswith("triton::")}
        repeated = {kernel for kernel in kernels if again[kernel] > launches[kernel]}
        assert {"triton::rms_norm_forward"} < repeated, name
        assert {kernel for kernel in kernels if kernel.endswith("_backward")} <= again.keys()


def test_an_operation_without_a_class_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"aten::nowhere at models/model/loss\.py:1 has no class"):
        kind_of(Launch("aten::nowhere", 0, 0, "models/model/loss.py:1", engine=False))
