"""Next programs compute what the confirmed ones do, in Triton's interpreter, and use the machine
better by their binaries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.kernels.binaries import Launch, compiled, launches
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.long._executed import count_executed, disassemble
from headrace.models.attestation.cases.case import Case, InputShape
from headrace.models.attestation.cases.convolutions import direct_case, modal_case
from headrace.models.attestation.cases.scans import ssd_case
from headrace.models.attestation.cases.tokens import gated_norm_case, norm_case
from headrace.models.kernels import KERNELS, NEXT, choice
from headrace.models.layers.attention.order import KernelsConfig
from headrace.trainer.run import process

VALUES = """
import json
import torch
from support.kernels.bf16_interpreter import correct_bf16
from headrace.models.attestation.cases.case import Draw, InputShape
from headrace.models.attestation.cases.compare import evaluate, measure_errors
from headrace.models.attestation.cases.convolutions import direct_case, fft_case, modal_case
from headrace.models.attestation.cases.scans import ssd_case
from headrace.models.attestation.cases.tokens import gated_norm_cases, norm_cases
from headrace.models.kernels import NEXT, choice, fft_convolution, layout, modal, modal_next
from headrace.models.kernels import short_convolution, ssd_next, toeplitz

torch.set_num_threads(1)
dtypes, ssd_next.DTYPES = ssd_next.DTYPES, (torch.float32, *ssd_next.DTYPES)
ssd_next.CHUNK, ssd_next.STATE_BLOCK = 8, 16  # several of each
ssd_next.MULTIPROCESSORS = 8  # a program has two of four heads
layout.PROGRAMS = 4  # loops of several rows
modal.BLOCK, modal_next.BACKWARD_UNROLL = 4, 2
modal_next.TILE, modal_next.CHANNELS = 8, 32  # several of each
draw, shape = Draw(torch.float32, "cpu", 1), InputShape(1, 28, 72)
norms = [*list(norm_cases())[:2], *list(gated_norm_cases())[:1]]
scans = [ssd_case(1, 4, state=True, packed=True), ssd_case(2, 2, state=False, packed=False)]
modals = [modal_case(5, gates=True, state=True, packed=True),
          modal_case(4, gates=False, state=False, packed=False)]
fft_convolution.MAX_NUMBERS, fft_convolution.PRODUCT_BLOCK = 1, 16
filters = [fft_case(33, 1, gates=True, packed=True), fft_case(40, 3, gates=False, packed=False)]
small = InputShape(1, 20, 39)
with choice.next_programs(NEXT):
    found = {f"{case.kernel}: {case.name}": measure_errors(case, draw, shape)
             for case in (*scans, *norms)}
    found |= {f"{case.kernel}: {case.name}": measure_errors(case, draw, small)
              for case in (*modals, *filters)}
    products = fft_convolution._next_programs()
    multiply = products.fft_convolution_multiply
    class Nothing:
        def __getitem__(self, grid):
            return lambda *_, **__: None
    products.fft_convolution_multiply = Nothing()
    without_products = measure_errors(filters[1], draw, small)
    products.fft_convolution_multiply = multiply
    programs = ssd_next._programs()[0]
    outputs, launched = programs.ssd_chunk_outputs, []
    class Without:
        def __getitem__(self, grid):
            launched.append(grid)
            return lambda *arguments, **constants: outputs[grid](
                *arguments[:3], torch.zeros_like(arguments[3]), *arguments[4:], **constants)
    programs.ssd_chunk_outputs = Without()
    without_decays = measure_errors(scans[0], draw, shape)
    programs.ssd_chunk_outputs = outputs
    walks = modal_next._programs()
    inputs = walks.modal_walk_inputs
    class WithoutLater:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: inputs[grid](
                *arguments[:7], torch.zeros_like(arguments[7]), *arguments[8:], **constants)
    walks.modal_walk_inputs = WithoutLater()
    without_later = measure_errors(modals[1], draw, small)
    walks.modal_walk_inputs = inputs
    correct_bf16()
    rounded = measure_errors(scans[0], Draw(torch.bfloat16, "cpu", 1), shape)
    rounded_modal = measure_errors(modals[0], Draw(torch.bfloat16, "cpu", 1), small)
    ssd_next.DTYPES = dtypes
    assert ssd_next.runs(torch.empty(0, dtype=torch.bfloat16))
    assert not ssd_next.runs(torch.empty(0))
assert not ssd_next.runs(torch.empty(0, dtype=torch.bfloat16))

layout.PROGRAMS = 1  # several chunks for each program
short_convolution.SPAN, short_convolution.NEXT_SPAN = 64, 32
long, equal, launched_filters = InputShape(1, 150, 16), [], []
carried = toeplitz._next_programs().toeplitz_backward_carried
class Counted:
    def __getitem__(self, grid):
        launched_filters.append(grid)
        return carried[grid]
toeplitz._next_programs().toeplitz_backward_carried = Counted()
for case in (
    direct_case("toeplitz", 40, 16, skip=True, packed=True),
    direct_case("toeplitz", 34, 8, history=True, packed=True),
    direct_case("toeplitz", 65, 16, gated=False),
    direct_case("short_convolution", 3, 1, gated=False, bias=True, history=True, packed=True),
):
    results = []
    for kernels in ((), NEXT):
        with choice.next_programs(kernels):
            results.append(evaluate(case.run, case.make(draw, long), draw, torch.Tensor.clone))
    equal += [torch.equal(results[0][name], results[1][name]) for name in results[0]]
assert len(launched_filters) == 3
print(json.dumps([found, without_decays, len(launched), without_later, without_products,
                  {**rounded, **{f"modal {name}": x for name, x in rounded_modal.items()}}, equal]))
"""


TESTS = str(Path(__file__).parents[2])
PATH = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []


@pytest.mark.slow
def test_next_programs_are_right() -> None:
    """Negative controls: the next programs of SSD are wrong without decays, those of Hyena-LI
    without gradients from later chunks or without products of spectra, so they are what ran."""
    done = subprocess.run(
        [sys.executable, "-c", VALUES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([TESTS, *PATH])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases, without_decays, launched, without_later, without_products, rounded, equal = json.loads(
        done.stdout
    )
    assert len(cases) == 9
    for name, tensor_errors in cases.items():
        assert max(tensor_errors.values()) < 1e-5, name
    assert max(without_decays.values()) > 1e-2 and launched == 2
    assert max(without_later.values()) > 1e-2 > max(list(without_later.values())[:1])
    assert max(without_products.values()) > 1e-2
    assert max(rounded.values()) < 2e-2
    assert len(equal) == 16 and all(equal), "next programs with equal bits have others"


SSD = ssd_case(1, 64, state=False, packed=True, head_dim=64, state_size=128)
SIZE = InputShape(1, 512, 4096)


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """End the group of fake ranks that `launches` begins."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(case: Case, name: str, *kernels: str) -> list[tuple[int, int]]:
    """Return the warps that a multiprocessor of sm_90 holds by registers, and the bytes spilled,
    for each launch of a program."""

    def launched() -> list[Launch]:
        with choice.next_programs(kernels):
            return [x for x in launches(case, SIZE, torch.bfloat16) if x.name.startswith(name)]

    measured = []
    for launch in launched():
        if dict(launch.constants).get("CUT"):  # sums of several ranks, which are loaded
            continue
        binary, warps = compiled(launch, 90), dict(launch.options)["num_warps"]
        measured.append((65536 // (binary.registers * 32 * warps) * warps, binary.spilled))
    return measured


@pytest.mark.parametrize(
    ("case", "kernel", "confirmed", "following"),
    [
        (norm_case(outside=False, residual=True), "rms_norm", 16, 32),
        (gated_norm_case(1), "gated_rms_norm", 8, 16),
    ],
)
def test_next_norms_hold_twice_the_warps(
    case: Case, kernel: str, confirmed: int, following: int
) -> None:
    name = f"{kernel}_backward"
    assert {warps for warps, _ in measure(case, name)} == {confirmed}
    assert set(measure(case, name, kernel)) == {(following, 0)}


@pytest.mark.slow
def test_next_programs_of_ssd_spill_nothing() -> None:
    assert max(spilled for _, spilled in measure(SSD, "ssd_outputs")) >= 32
    for program in ("ssd_walk_states", "ssd_chunk_outputs", "ssd_backward_scores"):
        assert max(spilled for _, spilled in measure(SSD, program, "ssd")) == 0, program


def test_next_programs_of_ssd_keep_inputs_alone() -> None:
    """For the backward pass: states at the starts of spans otherwise, a quarter of x here."""
    x, dt = torch.empty(2, 512, 64 + 32, dtype=torch.bfloat16), torch.empty(2, 512, 4)
    arguments = (x, dt, *torch.empty(3, 4), None, None, 16, 16, "")
    with FakeTensorMode(allow_non_fake_inputs=True):
        _, _, states, decays = torch.ops.headrace.ssd(*arguments)
        with choice.next_programs(["ssd"]):
            _, _, *kept = torch.ops.headrace.ssd(*arguments)
    assert states.numel() == 2 * 2 * 4 * 16 * 16 and decays.numel() == 2 * 2 * 4
    assert [tensor.numel() for tensor in kept] == [0, 0]


@pytest.mark.slow
def test_the_next_program_of_toeplitz_loads_a_tile_once() -> None:
    """Bytes that a warp loads and stores in a chunk."""
    case = direct_case("toeplitz", 128, 16)
    loaded = []
    for kernels in ((), ("toeplitz",)):
        with choice.next_programs(kernels):
            every = launches(case, SIZE, torch.bfloat16)
        [launch] = [launch for launch in every if launch.name.startswith("toeplitz_backward")]
        binary = compiled(launch, 90)
        assert not binary.spilled
        instructions = disassemble(binary.cubin)
        once, twice = (count_executed(instructions, [turns]).bytes for turns in (1, 2))
        loaded.append(twice - once)
    tile = 64 * 16 * 2 / 4
    assert loaded == [20 * tile, 9 * tile]


@pytest.mark.slow
def test_the_next_programs_of_modal_wait_at_no_barrier() -> None:
    """Nor do they spill; a multiprocessor holds 16 warps or more, where the others hold 8."""
    case = modal_case(16, gates=True, state=False, packed=True)
    confirmed = measure(case, "modal_backward")
    following = measure(case, "modal_walk", "modal")
    assert {warps for warps, _ in confirmed} == {8}
    assert len(following) == 4 and min(warps for warps, _ in following) >= 12
    assert not any(spilled for _, spilled in following)
    with choice.next_programs(["modal"]):
        for launch in launches(case, SIZE, torch.bfloat16):
            if launch.name.startswith("modal_walk"):
                opcodes = {line.opcode for line in disassemble(compiled(launch, 90).cubin)}
                assert "BAR" not in opcodes and "FFMA" in opcodes, launch.name


def test_a_key_chooses_them() -> None:
    assert set(NEXT) < set(KERNELS)
    assert KernelsConfig().next_programs() == []
    assert KernelsConfig(ssd="next").next_programs() == ["ssd"]
    every = replace(KernelsConfig(), **dict.fromkeys(NEXT, "next"))  # type: ignore[arg-type]
    assert every.next_programs() == list(NEXT)


def test_a_run_sets_them_for_its_process() -> None:
    run = SimpleNamespace(device="cpu", deterministic=False, kernels=KernelsConfig(ssd="next"))
    with choice.next_programs(["rms_norm"]), mock.patch.object(process.ranks, "initialise"):
        process.join_group(
            SimpleNamespace(run=run, threads=torch.get_num_threads()),  # type: ignore[arg-type]
            timedelta(minutes=1),
        )
        assert {"ssd"} == choice.NEXT
    assert not choice.NEXT
