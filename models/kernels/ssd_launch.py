"""Limits of ssd.py's programs, and the options with which they are launched.

Registers and warps are those of bf16 and sm_90, heads of 64 channels and 128 states
(benchmarks/results/long.next_binaries.txt).
"""

from __future__ import annotations

from typing import Any

from . import choice

MAX_HEAD_DIM, MAX_STATE_SIZE = 128, 256
"""Kernel limits: channels per head, and state numbers per channel."""
MAX_STATE_NUMBERS = 128 * 128
"""Kernel limit: state numbers per head."""
CONFIRMED = {"num_warps": 8, "num_stages": 1}
"""8 warps for programs with matrix products: accumulators fill the registers of four."""
CONFIRMED_PAIRS = {"num_warps": 4, "num_stages": 1}
"""64 rows are too few for eight warps."""
NEXT: dict[str, dict[str, int]] = {
    "span_states": {"num_warps": 8, "num_stages": 2},
    # Two programs a multiprocessor, where 255 registers of 8 warps leave room for one.
    "outputs": {"num_warps": 4, "num_stages": 2},
    # Two programs of 8 warps a multiprocessor, where four warps with 207 registers are two of 4.
    "pairs": {"num_warps": 8, "num_stages": 1, "maxnreg": 128},
    # 16 warps a multiprocessor, where 201 registers of 8 warps leave room for one program.
    "BC": {"num_warps": 16, "num_stages": 2},
}
"""Options of next programs. With two stages, a loop's next tiles are loaded while the present ones
are multiplied."""


def launch_options(program: str, *, fp32: bool) -> dict[str, Any]:
    """Return Triton's options for a launch.

    Two stages of fp32 tiles do not fit into the shared memory of all GPUs, nor into 128 registers.
    """
    if "ssd" in choice.NEXT and program in NEXT and not fp32:
        return dict(NEXT[program])
    return dict(CONFIRMED_PAIRS if program.startswith("pairs") else CONFIRMED)


def unsupported_reason(head_dim: int, state_size: int) -> str | None:
    """Return why the kernel does not support these sizes, or None."""
    dim, size = tile_side(head_dim), tile_side(state_size)
    if dim > MAX_HEAD_DIM or size > MAX_STATE_SIZE or dim * size > MAX_STATE_NUMBERS:
        return (
            f"heads are {head_dim} wide with {state_size} states for each channel; the limits"
            f" are {MAX_HEAD_DIM} and {MAX_STATE_SIZE}, and {MAX_STATE_NUMBERS} in all"
        )
    return None


def tile_side(size: int) -> int:
    """Round a matrix side up to a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())
