"""Lay out tensors for kernels, and divide work among programs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import choice

PROGRAMS = 2048
"""Approximate number of programs in a backward pass that sums over tokens: several per
multiprocessor on a large GPU, and few enough that their partial sums are small beside their
inputs."""

MAX_TOKEN_STRIDE = 1 << 20
"""Largest stride from a token to the next: programs compute offsets within a tile in 32 bits."""


def promote_dtypes(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the dtype to which torch promotes a and b."""
    return a.dtype if a.dtype == b.dtype else torch.promote_types(a.dtype, b.dtype)


def to_channels_last(x: Tensor) -> Tensor:
    """Return x [rows, length, width] with adjacent channels; slices from wider tokens are not
    copied."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= MAX_TOKEN_STRIDE else x.contiguous()


def split_tiles(num_tiles: int, num_columns: int) -> tuple[int, int]:
    """Return num_parts, tiles_per_part: cut each column's tiles such that all num_columns columns
    together need about PROGRAMS programs."""
    tiles_per_part = max(1, num_tiles * num_columns // PROGRAMS)
    return -(-num_tiles // tiles_per_part), tiles_per_part


def share_tiles(num_tiles: int, max_programs: int) -> tuple[int, int]:
    """Return num_programs ≤ max_programs, tiles_per_program."""
    tiles_per_program = max(1, -(-num_tiles // min(max_programs, PROGRAMS)))
    return -(-num_tiles // tiles_per_program), tiles_per_program


def row_loop_options(kernel: str, warps: int) -> dict[str, int]:
    """Return constants of a program that walks over rows, with `warps` for a row. As a next program
    it loads the next row while it computes, with half the registers a thread."""
    if kernel in choice.NEXT:
        return {"STAGES": 2, "num_warps": min(2 * warps, 32)}
    return {"STAGES": 1, "num_warps": warps}


@cache
def row_tile_sizes(width: int) -> tuple[int, int, int]:
    """Return block, rows_per_program, num_warps for programs that hold whole rows [width]: block is
    the power of two that holds a row, and a thread gets 16 numbers if possible."""
    block = 1 << max(width - 1, 1).bit_length()
    num_rows = max(1, min(16, 2048 // block))
    return block, num_rows, min(max(num_rows * block // 512, 4), 32)
