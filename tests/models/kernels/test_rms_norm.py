"""The kernel against its twin: by Triton's interpreter, and as binaries for GPUs not at hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Triton decides when it is imported whether to interpret: a process of its own for each.
AGAINST_THE_TWIN = """
import torch
from headrace.models.kernels import rms_norm
from headrace.models.norms import RMSNorm

torch.manual_seed(0)
for width, rows, eps, outside in [
    (8, 3, 1e-5, False), (33, 5, 1e-5, True), (64, 1, 1e-2, False), (50, 7, 1e-2, True)
]:
    norm = RMSNorm(width, eps, eps_outside=outside)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, rows, width, requires_grad=True)
    grad = torch.randn(2, rows, width)
    expected = norm.plain(x)
    wanted = torch.autograd.grad(expected, (x, norm.weight), grad)
    rms_norm.PROGRAMS = 4  # several rows for each program, and a rest
    found = rms_norm.rms_norm(x, norm.weight, eps, outside)
    got = torch.autograd.grad(found, (x, norm.weight), grad)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    other_way = rms_norm.rms_norm(x, norm.weight, eps, not outside)
    assert not torch.allclose(other_way, expected, rtol=1e-7, atol=0), "the control must differ"
print("equal")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.models.kernels.programs import rms_norm as kernels

for capability in (80, 90):
    for kind in ("fp32", "bf16", "fp16"):
        for outside in (False, True):
            for kernel, pointers in ((kernels.forward, 3), (kernels.backward, 5)):
                names = kernel.arg_names
                signature = {}
                for number, name in enumerate(names):
                    if name in ("EPS_OUTSIDE", "BLOCK"):
                        signature[name] = "constexpr"
                    elif name == "partial":
                        signature[name] = "*fp32"
                    elif number < pointers:
                        signature[name] = f"*{kind}"
                    else:
                        signature[name] = "fp32" if name == "eps" else "i32"
                source = ASTSource(
                    kernel, signature, {"EPS_OUTSIDE": outside, "BLOCK": 4096}
                )
                binary = triton.compile(source, target=GPUTarget("cuda", capability, 32))
                assert binary.asm["cubin"]
print("compiled")
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_kernel_is_its_twin() -> None:
    assert run(AGAINST_THE_TWIN, TRITON_INTERPRET="1") == "equal"


@pytest.mark.slow
def test_every_configuration_becomes_a_binary() -> None:
    assert run(COMPILED) == "compiled"
