"""Programs of mamba_ssm's scan as launches, to be compiled and counted beside headrace's.

Its Triton code runs on tensors of a CPU with launches replaced. Where it would measure several
configurations on a device, the one that is counted executes fewest instructions or moves fewest
bytes, whichever takes longer on an H100.

The source of a release suffices, as data: unpack it, and name its folder in PYTHONPATH.

    MAMBA_SKIP_CUDA_BUILD=TRUE pip download mamba-ssm --no-deps --no-binary :all: \\
        --no-build-isolation
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from support.kernels.binaries import Launch, compiled, record_launch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ._executed import Instruction, count_executed, disassemble, find_loops
from ._kernel_libraries import CHUNK, scans

MULTIPROCESSORS = 132
INSTRUCTIONS_PER_NS = MULTIPROCESSORS * 4 * 1.755
BYTES_PER_NS = 3020


@dataclass(frozen=True)
class Scan:
    """Sizes of a call, one row with one group."""

    length: int
    heads: int
    head_dim: int
    state_size: int

    @property
    def chunks(self) -> int:
        return self.length // CHUNK

    def turns(self, launch: Launch, instructions: Sequence[Instruction]) -> Sequence[float]:
        """Return the turns of a program's loops, in the order of their addresses."""
        turns = self._source_turns(launch)
        if len(find_loops(instructions)) == len(turns) + 1:  # the assembler unrolled four turns
            return turns[0] / 4, 0
        return turns

    def _source_turns(self, launch: Launch) -> Sequence[float]:
        name, blocks = launch.name, dict(launch.constants)
        rows, columns = blocks.get("BLOCK_SIZE_M", 1), blocks.get("BLOCK_SIZE_N", 1)
        inner = blocks.get("BLOCK_SIZE_K", 1)
        if name in ("_chunk_state_fwd_kernel", "_chunk_scan_bwd_dstates_kernel"):
            return (-(-CHUNK // inner),)
        if name == "_bmm_chunk_fwd_kernel":
            return (-(-self.state_size // inner),)
        if name == "_bmm_chunk_bwd_kernel":
            return (-(-CHUNK // blocks["BLOCK_SIZE_CS"]),)
        if name == "_state_passing_fwd_kernel":
            return (self.chunks,)
        if name == "_state_passing_bwd_kernel":
            return (self.chunks - 1,)
        if name in ("_chunk_scan_fwd_kernel", "_chunk_scan_chunk_state_bwd_dx_kernel"):
            return (_mean_tiles(rows, inner),)
        if name == "_chunk_scan_bwd_ddAcs_stable_kernel":
            reached = _mean_tiles(rows, columns)
            return reached, CHUNK / columns - reached
        if name in ("_chunk_state_bwd_db_kernel", "_chunk_scan_bwd_dc_kernel"):
            tiles = -(-CHUNK // rows) * -(-self.state_size // columns)
            return (self.heads * tiles * self.chunks / launch.programs,)
        if name == "_chunk_scan_bwd_dcb_kernel":  # tiles above the diagonal end at once
            tiles = -(-CHUNK // rows) * -(-CHUNK // columns)
            reached = -(-CHUNK // rows) * _mean_tiles(rows, columns)
            return (self.heads * reached * self.chunks / launch.programs,)
        return ()


def _mean_tiles(rows: int, columns: int) -> float:
    """Return the mean over blocks of rows of the tiles that reach the diagonal of a chunk."""
    ends = range(rows, CHUNK + rows, rows)
    return sum(-(-min(end, CHUNK) // columns) for end in ends) / len(ends)


def list_launches(scan: Scan) -> tuple[list[Launch], list[Launch]]:
    """Return the launches of a forward and of a backward pass; none without mamba_ssm."""
    recorded: list[list[Launch]] = []
    configurations: list[Launch] | None = None
    settings: dict[str, Any] = {}

    def record(program: JITFunction, *args: Any, grid: Any, **options: Any) -> None:
        options.pop("warmup", None)
        sizes = grid(settings | options) if callable(grid) else grid
        launch = record_launch(program, args, {**options, "grid": tuple(sizes)})
        if configurations is None:
            recorded.append([launch])
        else:
            configurations.append(launch)

    def record_all(tuner: Autotuner, *args: Any, **options: Any) -> None:
        nonlocal configurations, settings
        configurations, settings = [], dict(zip(tuner.arg_names, args, strict=False))
        for configuration in tuner.configs:
            tuner.fn.run(*args, **options, **configuration.all_kwargs())
        tuner.best_config = tuner.configs[0]
        recorded.append(configurations)
        configurations, settings = None, {}

    run = scans(scan.head_dim, scan.state_size).get("mamba_ssm")
    if run is None:
        return [], []
    width = scan.heads * scan.head_dim + 2 * scan.state_size
    xBC, dt = (
        torch.zeros(1, scan.length, size, dtype=torch.bfloat16, requires_grad=True)
        for size in (width, scan.heads)
    )
    parameters = [torch.ones(scan.heads, requires_grad=True) for _ in range(3)]
    device = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(Autotuner, "run", record_all),
        mock.patch.object(torch.cuda, "device", lambda *_: nullcontext()),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: device),
    ):
        y = run(xBC, dt, *parameters)
        num_forward = len(recorded)
        y.backward(torch.ones_like(y))
    best = [_fastest(launches, scan) for launches in recorded]
    return best[:num_forward], best[num_forward:]


def _fastest(launches: list[Launch], scan: Scan) -> Launch:
    def count_ns(launch: Launch) -> float:
        instructions = disassemble(compiled(launch, 90).cubin)
        executed = count_executed(instructions, scan.turns(launch, instructions))
        warps = dict(launch.options).get("num_warps", 4) * launch.programs
        return warps * max(
            executed.instructions / INSTRUCTIONS_PER_NS, executed.bytes / BYTES_PER_NS
        )

    return min(launches, key=count_ns)
