"""Binaries of the kernels for GPUs that this machine need not have, and the resources they need.

A case runs with launches replaced: each launch is recorded with its types and constants, and can
then be compiled for any GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from headrace.models.attestation.cases.case import Case, Draw, InputShape
from headrace.models.attestation.cases.compare import evaluate
from headrace.models.kernels import (
    choice,
    delta,
    gated_rms_norm,
    layout,
    linear_cross_entropy,
    modal_states,
    selective_scan,
    ssd,
)
from headrace.models.parallel.axes import Axis

KINDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
LONG = InputShape(1, 512, 4096)
"""Rows that count as long here: a few PROGRAMS process several tiles each."""
PROGRAMS = 16


@dataclass(frozen=True)
class Launch:
    """A program, and everything that its binary depends on."""

    program: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    """Arguments that are multiples of 16."""
    options: tuple[tuple[str, int], ...]
    programs: int = field(compare=False, default=1)
    """Programs of the first launch."""
    bytes: int = field(compare=False, default=0)
    """Bytes of its tensors, each once."""

    @property
    def name(self) -> str:
        name: str = self.program.fn.__name__
        return name

    @property
    def multiplies(self) -> bool:
        """True if it has matrix products, which must run on the matrix units."""
        scalar = (
            *("modal_scan_states", "ssd_scan_states"),
            *("ssd_delta", "ssd_backward_dt", "ssd_backward_sum_BC", "delta_cumsum"),
            *("ssd_decays", "ssd_backward_decays"),
            *("modal_walk_chunk_states", "modal_walk_outputs", "modal_walk_inputs"),
        )
        return (
            self.name.startswith(("delta", "modal", "ssd", "toeplitz")) and self.name not in scalar
        )

    @property
    def configuration(self) -> str:
        """Return the constants of the configuration, in short."""
        chosen = [
            name.lower() if value is True else f"{name.lower()}={value}"
            for name, value in self.constants
            if name.isupper() and value is not False
        ]
        return " ".join([*chosen, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True)
class Binary:
    cubin: bytes
    registers: int
    spilled: int
    """Bytes of local memory for each thread."""
    shared: int
    """Bytes of shared memory for each program."""
    products: int
    """Instructions of the matrix units."""
    narrow: int
    """Instructions that load or store fewer than four bytes of a thread."""


def launches(case: Case, shape: InputShape, dtype: torch.dtype) -> list[Launch]:
    """Return each launch of a forward and a backward pass on a GPU, once; then the launches of the
    first of two ranks."""
    recorded: dict[Launch, None] = {}

    def record(program: JITFunction, *args: Any, **options: Any) -> None:
        recorded[record_launch(program, args, options)] = None

    draw = Draw(dtype, "cpu", 0)
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(choice, "INTERPRETED", True),
        mock.patch.object(layout, "PROGRAMS", PROGRAMS),
    ):
        evaluate(case.run, case.make(draw, shape), draw, torch.Tensor.clone)
        with divided():
            evaluate(case.run, case.make(draw, shape), draw, torch.Tensor.clone)
    return list(recorded)


def launches_by_pass(
    case: Case, shape: InputShape, dtype: torch.dtype
) -> tuple[list[Launch], list[Launch]]:
    """Return all launches of a forward and of a backward pass, on one rank."""
    recorded: list[Launch] = []

    def record(program: JITFunction, *args: Any, **options: Any) -> None:
        recorded.append(record_launch(program, args, options))

    draw = Draw(dtype, "cpu", 0)
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(choice, "INTERPRETED", True),
    ):
        with torch.no_grad():
            case.run(**case.make(draw, shape))
        num_forward = len(recorded)
        recorded.clear()
        evaluate(case.run, case.make(draw, shape), draw, torch.Tensor.clone)
    return recorded[:num_forward], recorded[num_forward:]


@contextmanager
def divided() -> Iterator[None]:
    """Let kernels run as the first of two ranks; messages to the other rank are dropped."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    axis = Axis(dist.group.WORLD, 0, 2)
    with ExitStack() as patched:
        for module in (
            delta,
            gated_rms_norm,
            linear_cross_entropy,
            modal_states,
            selective_scan,
            ssd,
        ):
            patched.enter_context(mock.patch.object(module, "find_axis", lambda _: axis))
        yield


def record_launch(program: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    arguments = dict(zip(program.arg_names, args, strict=False))
    arguments |= {name: value for name, value in options.items() if name in program.arg_names}
    signature, constants, divisible = {}, {}, []
    for number, parameter in enumerate(program.params):
        value = arguments[parameter.name]
        specialized = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialized and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{KINDS[value.dtype]}"
            divisible.append(number)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if specialized and value % 16 == 0:
                divisible.append(number)
    return Launch(
        program,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple(divisible),
        tuple((name, options[name]) for name in OPTIONS if name in options),
        prod(options["grid"]),
        _bytes(value for value in arguments.values() if isinstance(value, torch.Tensor)),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; a view that lies in another one counts once."""
    extents: dict[tuple[int, int], int] = {}
    for x in tensors:
        if x.numel():
            key = x.untyped_storage().data_ptr(), x.storage_offset()
            extents[key] = max(extents.get(key, 0), x.numel() * x.element_size())
    return sum(extents.values())


def compiled(launch: Launch, capability: int) -> Binary:
    source = ASTSource(
        launch.program,
        dict(launch.signature),
        dict(launch.constants),
        {(number,): [["tt.divisibility", 16]] for number in launch.divisible},
    )
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options=dict(launch.options))
    cubin = binary.asm["cubin"]
    registers, spilled = resources(cubin)
    ptx = binary.asm["ptx"]
    products = len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", ptx))
    narrow = len(re.findall(r"\b(?:ld|st)\.global(?:\.\w+::\w+)*\.b(?:8|16)\b", ptx))
    return Binary(cubin, registers, spilled, binary.metadata.shared, products, narrow)


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory, from the assembler."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", output)
    assert usage, output
    return int(usage[1]), int(usage[2]) + int(usage[3])


def every_launch(
    cases: Iterable[Case], shape: InputShape, dtypes: Iterable[torch.dtype]
) -> list[Launch]:
    """Return the launches of all cases, each once."""
    every = (
        launch for dtype in dtypes for case in cases for launch in launches(case, shape, dtype)
    )
    return list(dict.fromkeys(every))
