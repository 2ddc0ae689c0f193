"""Every kernel against its twin in Triton's interpreter, and as binaries for other GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.models.kernels import KERNELS

TESTS = str(Path(__file__).parents[2])
PATH = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []

# Triton chooses its interpreter at import: the test needs a process of its own.
INTERPRETED = """
import dataclasses, json, sys
import torch
from support.kernels.bf16_interpreter import correct_bf16
from headrace.models.attestation.cases import all_cases
from headrace.models.attestation.cases.case import Draw
from headrace.models.attestation.cases.compare import measure_errors
from headrace.models.kernels import delta, fft_convolution, layout
from headrace.models.kernels import modal, selective_scan, short_convolution, ssd_launch

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True, warn_only=True)  # unwritten memory is NaN
fft_convolution.MAX_NUMBERS = 1  # a few channels at a time
delta.CHUNK, delta.CHANNELS = 32, 16  # several blocks of tokens and of channels
layout.PROGRAMS = 4  # several tiles for each program, and a rest
modal.BLOCK = modal.BLOCKS = 4
modal.TOKEN_BYTES = 512  # all channels: several tiles for each of several chunks
selective_scan.CHUNK, selective_scan.UNROLL = 8, 4
short_convolution.SPAN, short_convolution.UNROLL = 32, 8
ssd_launch.CHUNK, ssd_launch.CHUNKS, ssd_launch.MAX_HEADS = 16, 2, 2  # several of each
short_convolution.CHANNELS = 64
correct_bf16()
draw = Draw(getattr(torch, sys.argv[1]), "cpu", 1)
cases = all_cases()
if sys.argv[2] == "a few of each kernel":
    last = {case.kernel: case.name for case in cases}
    quick = {  # together they have every option of the last one, which takes long
        "toeplitz": ("65 taps", "17 taps"),
        "short_convolution": ("3 taps, 1 each, bias", "4 taps", "1 taps"),
    }
    few = last | quick
    cases = [case for case in cases if case.name.startswith(few[case.kernel])]
found = {f"{case.kernel}: {case.name}": measure_errors(case, draw, case.tiny) for case in cases}
nudged = {}
for case in cases if sys.argv[1] == "float32" else []:
    for name, value in case.make(draw, case.tiny).items():
        def nudge(name=name, case=case, **inputs):
            moved = inputs[name]
            if isinstance(moved, torch.Tensor) and moved.is_floating_point():
                inputs[name] = moved + 1e-3 * moved.roll(1, -1)
            return case.twin(**inputs)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            other = dataclasses.replace(case, run=case.twin, twin=nudge)
            error = max(measure_errors(other, draw, case.tiny).values())
            nudged[f"{case.kernel}: {case.name}: {name}"] = error
print(json.dumps([found, nudged]))
"""

IN_A_GRAPH = """
import sys
import torch
from headrace.models.attestation.cases import all_cases
from headrace.models.attestation.cases.case import Draw, InputShape
from headrace.models.attestation.cases.compare import add_gaps, evaluate
from headrace.models.kernels import modal, selective_scan

torch.set_num_threads(1)
modal.BLOCK = modal.BLOCKS = 4
selective_scan.CHUNK = 8  # the interpreter also scans tokens outside the row
draw, shape = Draw(torch.float32, "cpu", 2), InputShape(1, 9, 72)
last = {case.kernel: case for case in all_cases()}

for case in last.values():
    inputs = case.make(draw, shape)
    graph = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    alone = evaluate(case.run, inputs, draw, torch.Tensor.clone)
    together = evaluate(graph, inputs, draw, add_gaps)
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, msg=f"{case.kernel}: {name}")
    nothing = evaluate(case.run, case.make(draw, InputShape(0, 9, 72)), draw, torch.Tensor.clone)
    assert not any(value.count_nonzero() for value in nothing.values()), case.kernel
    calls = []
    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "headrace":
                calls.append((function, args))
            return function(*args, **(kwargs or {}))
    with Calls():
        evaluate(case.run, inputs, draw, torch.Tensor.clone)
    assert calls, case.kernel
    for function, args in calls:
        detached = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(function, tuple(detached), test_utils=tests)
print("kept")
"""

COMPILED = """
import sys
import torch
from support.kernels.binaries import LONG, compiled, every_launch
from headrace.models.attestation.cases import all_cases

cases = [case for case in all_cases() if case.kernel == sys.argv[1]]
types = [getattr(torch, name) for name in sys.argv[2].split()]
SHARED = {"80": 163 * 1024, "90": 227 * 1024, "100": 227 * 1024}  # more is rejected
for launch in every_launch(cases, LONG, types):
    for capability in sys.argv[3].split():
        binary = compiled(launch, int(capability))
        assert binary.shared <= SHARED[capability], f"{binary.shared} bytes shared: {launch}"
        assert (binary.products > 0) == launch.multiplies, f"on the matrix units: {launch}"
        if types == [torch.bfloat16]:
            assert binary.spilled <= 64, f"{binary.spilled} bytes spilled: {launch}"
print("compiled")
"""

A_FEW = """
import json
import torch
from support.kernels.binaries import LONG, compiled, every_launch
from headrace.models.attestation.cases import all_cases
from headrace.models.attestation.cases.case import InputShape

[case, _] = [case for case in all_cases() if case.kernel == "linear_cross_entropy"]
launches = every_launch([case], InputShape(1, 16, 208), [torch.bfloat16])
narrow = {launch.name: compiled(launch, 90).narrow for launch in launches}
case = next(case for case in all_cases() if case.kernel == "toeplitz" and "packed" in case.name)
products = {}
for launch in every_launch([case], LONG, [torch.bfloat16]):
    binaries = {capability: compiled(launch, capability) for capability in (80, 90, 100)}
    products[launch.name] = [binary.products for binary in binaries.values()]
print(json.dumps([narrow, products]))
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, *PATH]), **environment},
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("a few of each kernel", marks=pytest.mark.slow),
        pytest.param("all", marks=pytest.mark.long),
    ],
)
def test_every_kernel_equals_its_twin(cases: str) -> None:
    result, nudged = json.loads(run(INTERPRETED, "float32", cases, TRITON_INTERPRET="1"))
    assert {case.partition(":")[0] for case in result} == set(KERNELS)
    for case, errors in result.items():
        assert max(errors.values()) < 1e-5, (case, errors)
    for case, error in nudged.items():
        assert error > 1e-4, f"negative control: the comparison does not see {case}"


@pytest.fixture(scope="module")
def a_few() -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(run(A_FEW))
    return result


@pytest.mark.slow
def test_an_odd_vocabulary_is_read_in_vectors(a_few: list[dict[str, Any]]) -> None:
    """One number alone is read: the logit of the target."""
    programs = {"statistics": 1, "gradients": 0, "scale": 0}
    assert a_few[0] == {f"linear_cross_entropy_{name}": count for name, count in programs.items()}


@pytest.mark.slow
def test_packed_filters_compile_for_three_generations(a_few: list[dict[str, Any]]) -> None:
    """sm_80, sm_90 and sm_100: each has its own instructions of the matrix units."""
    assert a_few[1].keys() == {"toeplitz_forward", "toeplitz_backward"}
    for products in a_few[1].values():
        assert all(products) and len(set(products)) > 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 5e-3), ("float16", 6e-4)])
def test_half_precision_loses_only_rounding(dtype: str, bound: float) -> None:
    """A few roundings, each at most half of the last bit: 2⁻⁹ and 2⁻¹² of a number."""
    result, _ = json.loads(run(INTERPRETED, dtype, "all", TRITON_INTERPRET="1"))
    assert {case.partition(":")[0] for case in result} == set(KERNELS)
    for case, errors in result.items():
        assert max(errors.values()) < bound, (case, errors)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_compiled_graph_keeps_kernels() -> None:
    assert run(IN_A_GRAPH, TRITON_INTERPRET="1") == "kept"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_configuration_compiles(kernel: str) -> None:
    assert run(COMPILED, kernel, "bfloat16", "80 90 100") == "compiled"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_types_and_gpus_compile(kernel: str) -> None:
    assert run(COMPILED, kernel, "float32 bfloat16 float16", "80 90") == "compiled"
