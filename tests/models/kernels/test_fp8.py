"""Kernels that store rows in FP8, in Triton's interpreter and as binaries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[2])

# Triton chooses its interpreter at import: the test needs a process of its own.
INTERPRETED = """
import sys
import torch
from support.kernels.bf16_interpreter import correct_bf16
from headrace.models.attestation.cases.case import Draw, InputShape
from headrace.models.attestation.cases.compare import evaluate
from headrace.models.attestation.cases.fp8 import fp8_cases
from headrace.models.kernels.fp8 import E4M3
from headrace.models.layers import fp8

torch.set_num_threads(1)
correct_bf16()
for dtype in (torch.float32, torch.bfloat16):
    draw, shape = Draw(dtype, "cpu", 1), InputShape(2, 9, 72)
    for case in fp8_cases():
        inputs = case.make(draw, shape)
        found = evaluate(case.run, inputs, draw, torch.Tensor.clone)
        wanted = evaluate(case.twin, inputs, draw, torch.Tensor.clone)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (case.name, dtype, name)
        *_, stored, values, scales = (found[name] for name in found if name.startswith("output"))
        rounded = fp8.plain(stored, None, None)
        assert values.dtype == E4M3 and torch.equal(scales, rounded.scales), (case.name, dtype)
        assert torch.equal(values.float(), rounded.values.float()), (case.name, dtype)
        assert not torch.equal(fp8.plain(stored * 1.01, None, None).values.float(), values.float())

from headrace.console.config import build
from headrace.models.config.config import ModelConfig
from headrace.models.transforms.fp8 import quantize
from headrace.models.model.model import Model
from headrace.models.config.options.precision import Fp8Config

kernel = {"kernel": "triton"}
config = build(ModelConfig, {
    "vocab_size": 23, "width": 32, "pattern": "[attention, se, mamba]", "mlp": "glu", **kernel,
    "operators": {
        "attention": {"kind": "attention", "heads": 2, **kernel},
        "se": {"kind": "hyena-se", "groups": 4, **kernel},
        "mamba": {"kind": "mamba2", "state_size": 4, "head_dim": 16, "chunk": 8, **kernel},
        "glu": {"kind": "glu", "hidden": 48, **kernel},
    },
}, source="a test")
tokens = torch.randint(0, 23, (1, 8))
results = []
for stores in (True, False):
    model = quantize(Model(config), Fp8Config(smallest=16, ends=0))
    model.init_weights(0)
    taken = []
    fp8.kernel.fp8_rows, ask = fp8.kernel.fp8_rows, fp8.quantize
    fp8.quantize = lambda x, *more, ask=ask: (taken.append(x.shape), ask(x, *more))[1]
    for block in model.typed_blocks():
        for branch in block.branches():
            assert branch.stores
            branch.stores = stores
    y = model(tokens)
    fp8.quantize = ask
    gradients = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    results.append((len(taken), [y, *gradients]))
assert results[0][0] == results[1][0] - 6, [count for count, _ in results]
assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
print("equal")
"""

COMPILED = """
import torch
from support.kernels.binaries import LONG, compiled, launches
from headrace.models.attestation.cases.fp8 import fp8_cases

for case in fp8_cases():
    for launch in launches(case, LONG, torch.bfloat16):
        binary = compiled(launch, 90)
        assert binary.spilled <= 64, (launch, binary.spilled)
print("compiled")
"""


def run(code: str, **environment: str) -> str:
    path = [TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_kernels_store_what_the_twin_rounds() -> None:
    """To the bit, beside outputs and gradients of the kernel without FP8; and a model computes the
    same from stored rows."""
    assert run(INTERPRETED, TRITON_INTERPRET="1") == "equal"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_stores_compile() -> None:
    assert run(COMPILED) == "compiled"
