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

from benchmarks._fake_gpu import Launch
from benchmarks._launch_kinds import kind_of
from headrace.models.accounting.count import build_meta
from headrace.models.config import load_model_config

ROOT = Path(__file__).parents[2]
TOKENS = 1024
MODELS = ("tiny-transformer", "tiny-hybrid", "tiny-mamba")
SCRIPT = """
import json, torch
from collections import Counter
from benchmarks._fake_gpu import fake_gpu
from benchmarks.step_counts import count_step, kind_of
from headrace.models.config import load_model_config
for name in {models!r}:
    counts = count_step(load_model_config(name), {tokens}, [0, 100, 101, 640, {tokens}])
    kinds = {{kind: counts.bytes(kind) for kind in map(kind_of, counts.launches)}}
    waits = [(wait.name, wait.place) for wait in counts.waits]
    names = Counter(each.name for each in counts.launches)
    again = count_step(load_model_config(name), {tokens}, [0, {tokens}], recompute="block")
    again = Counter(each.name for each in again.launches)
    print(json.dumps([name, counts.gemm_flops, kinds, waits, counts.saved, again, names]))
with fake_gpu() as gpu:
    x, host = torch.zeros(3, device="cuda"), torch.zeros(3)
    host.to("cuda", non_blocking=True), x.to("cpu", non_blocking=True), x.sum(), host.sum().item()
    quiet = len(gpu.waits)
    x.sum().item(), x.cpu(), x.tolist(), bool(x.any()), host.copy_(x), torch.equal(x, x)
    torch.cuda.synchronize()
    reads = [wait.name for wait in gpu.waits]
    try:
        x.nonzero()
    except Exception as error:
        reads.append(type(error).__name__)
print(json.dumps([quiet, reads]))
"""


def counted(models: tuple[str, ...]) -> list[list[Any]]:
    """Count steps in another process, whose process groups and device are fake."""
    code = SCRIPT.format(models=models, tokens=TOKENS)
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


@pytest.fixture(scope="session")
def steps() -> list[list[Any]]:
    return counted(MODELS)


@pytest.mark.slow
def test_the_host_waits_once_in_a_step(steps: list[list[Any]]) -> None:
    for _, _, _, waits, *_ in steps[:-1]:
        assert [name for name, _ in waits] == ["synchronize"]
        assert re.fullmatch(r"trainer/loop/transfer\.py:\d+ wait", waits[0][1]), waits


@pytest.mark.slow
def test_every_read_of_the_device_is_a_wait(steps: list[list[Any]]) -> None:
    """Negative control: each form of a read is seen, and copies that do not wait are none."""
    quiet, reads = steps[-1]
    assert quiet == 0
    scalar, copy = "aten::_local_scalar_dense", "aten::_to_copy"
    assert reads == [
        *(scalar, copy, *[scalar] * 3, scalar, "aten::copy_", "aten::equal", "synchronize"),
        "DynamicOutputShapeException",
    ]


@pytest.mark.slow
def test_packed_attention_is_one_call_in_a_layer(steps: list[list[Any]]) -> None:
    for name, *_, launches in steps[:-1]:
        layers = sum(layer.mixer == "attention" for layer in load_model_config(name).layers)
        for call in ("_varlen_attn", "_varlen_attn_backward"):
            assert launches.get(f"torch_attn::{call}", 0) == layers
        assert not [launch for launch in launches if "index" in launch or "product" in launch]


@pytest.mark.slow
def test_gemm_flops_are_those_of_the_weights(steps: list[list[Any]]) -> None:
    config_name = MODELS[0]
    config = load_model_config(config_name)
    model = build_meta(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    if config.tie_embeddings is False:
        matrices -= config.vocab_size * config.width  # rows of the embedding are gathered
    [flops] = [flops for name, flops, *_ in steps[:-1] if name == config_name]
    assert flops == 6 * TOKENS * matrices


@pytest.mark.slow
def test_every_kind_is_counted(steps: list[list[Any]]) -> None:
    for name, _, kinds, _, saved, *_ in steps[:-1]:
        attends = name != "tiny-mamba"
        assert set(kinds) - {"attention"} == {"GEMM", "kernel", "glue", "engine"}
        assert ("attention" in kinds) == attends and saved > 0


@pytest.mark.slow
def test_recompute_runs_each_kernel_again(steps: list[list[Any]]) -> None:
    """Recompute lets a backward pass read its saved tensors once."""
    for name, *_, again, launches in steps[:-1]:
        kernels = {each for each in launches if each.startswith("triton::")}
        repeated = {each for each in kernels if again[each] > launches[each]}
        assert {"triton::rms_norm.forward"} < repeated, name
        assert {each for each in kernels if each.endswith(".backward")} <= again.keys()


def test_an_operation_without_a_class_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"aten::nowhere at models/loss\.py:1 has no class"):
        kind_of(Launch("aten::nowhere", 0, 0, "models/loss.py:1", engine=False))
