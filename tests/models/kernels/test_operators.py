"""Operators with interpreted kernels, compared with plain torch in fp64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[2])
PATH = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []

PROGRAM = """
import dataclasses, json
import torch
from support.kernels.operator_checks import context, make, normal
from headrace.console.errors import LayoutError
from headrace.models.layers.gated_convolution import gated_convolution
from headrace.models.layers.gated_scan import gated_scan
from headrace.models.kernels import selective_scan
from headrace.models.model.loss import cross_entropy, fused_loss
from headrace.models.layers.norms import RMSNorm

torch.set_num_threads(1)
selective_scan.CHUNK, selective_scan.UNROLL = 8, 4
off = {}

def results(operator, kernel, cuts):
    operator.options = dataclasses.replace(operator.options, kernel=kernel)
    dtype = torch.float32 if kernel == "triton" else torch.float64
    operator.to(dtype)
    u = normal(1, LENGTH, operator.width).to(dtype).requires_grad_()
    y = operator(u, context(1, LENGTH, cuts))
    names, weights = zip(*operator.named_parameters())
    found = torch.autograd.grad(y, (u, *weights), normal(*y.shape, seed=2).to(dtype))
    return dict(zip(("y", "u", *names), (y.detach(), *found)))

def compare(what, got, wanted):
    for name, value in wanted.items():
        off[f"{what}: {name}"] = float((got[name].double() - value).norm() / value.norm())

LENGTH, CUTS = 29, (0, 1, 11, 12, 29)
mamba = make("mamba1", state_size=3, heads=2, dt_rank=2)
packed = results(mamba, "torch", CUTS)
compare("mamba1", results(mamba, "triton", CUTS), packed)
compare("without documents, mamba1", results(mamba, "triton", None), packed)

LENGTH, CUTS = 270, (0, 3, 10, 270)  # a filter too long for the other kernels
hyena = make("hyena-li-freeform", filter_horizon=280)
packed = results(hyena, "torch", CUTS)
compare("freeform", results(hyena, "triton", CUTS), packed)
compare("without documents, freeform", results(hyena, "triton", None), packed)

# Types mix as they do in plain torch.
half = torch.float16
mixed = []
for wide in range(3):
    kinds = [torch.float32 if n == wide else half for n in range(3)]
    stream, x, weight = (normal(3, 8, seed=n).to(kind) for n, kind in enumerate(kinds))
    got = []
    for kernel in ("triton", "torch"):
        norm = RMSNorm(8, 1e-5, kernel=kernel)
        norm.weight = torch.nn.Parameter(weight[0])
        given = [t.clone().requires_grad_() for t in (stream, x)]
        sides = *norm(given[1], given[0]), *norm(given[1], with_input=True)
        total = sum((side.double() * (side.double() + 1)).sum() for side in sides)
        got.append((*sides, *torch.autograd.grad(total, [*given, norm.weight])))
    mixed += zip(*got)
hidden, matrix = normal(1, 5, 8), normal(11, 8)
aims = {"targets": torch.arange(10)[None, ::2], "weights": torch.ones(1, 5), "z_loss": 0.01}

def plain_loss(hidden, matrix, **aims):
    return cross_entropy(hidden @ matrix.T, **aims)

got = []
for run in (fused_loss, plain_loss):
    given = [t.float().requires_grad_() for t in (hidden, matrix)]
    with torch.autocast("cpu", half):
        total = run(*given, **aims, vocab_size=11)[0]
    got.append((total, *torch.autograd.grad(total, given)))
mixed += zip(*got)
mixed = [
    [str(ours.dtype), str(theirs.dtype), float((ours - theirs).norm() / theirs.norm())]
    for ours, theirs in mixed
]

# `kernel: triton` raises where a kernel cannot run.
ones = torch.ones
x, taps = ones(1, 9, 4), ones(4, 300)
wide, own = ones(1, 9, 2, 3), ones(2, 3)
heads = dict(x=wide, dt=wide, bias=own, D=own, z=wide.flatten(2))
states = dict(A=-ones(2, 3, 65), B=ones(1, 9, 2, 65), C=ones(1, 9, 2, 65))
refused = []
for run in (
    lambda: gated_scan(**heads, **states, kernel="triton"),
    lambda: gated_convolution(x, taps, bias=ones(4), kernel="triton"),
    lambda: gated_convolution(x, taps, history=ones(1, 299, 4), kernel="triton"),
):
    try:
        run()
    except LayoutError as error:
        refused.append(str(error))
print(json.dumps([off, mixed, refused]))
"""


@pytest.mark.slow
def test_operators_equal_plain_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([TESTS, *PATH]),
            "TRITON_INTERPRET": "1",
        },
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    off, mixed, refused = json.loads(done.stdout.strip().splitlines()[-1])
    assert {case.partition(":")[0] for case in off} >= {"mamba1", "freeform"}
    for case, error in off.items():
        if case.startswith("without"):
            assert error > 1e-3 or "bias" in case, f"negative control: {case}"
        else:
            assert error < 1e-5, (case, error)
    for ours, theirs, error in mixed:
        assert ours == theirs and error < 2e-3, mixed
    named = [next(name for name in ("scan", "fft") if name in said) for said in refused]
    assert named == ["scan", "fft", "fft"], refused
