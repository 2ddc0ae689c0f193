"""Layout of tensors for kernels, and division of work among programs."""

from __future__ import annotations

import torch
from torch import Tensor

PROGRAMS = 2048
"""Approximate number of programs of a backward pass that sums over tokens: several for each
multiprocessor of a large GPU, and few enough that their partial sums are small beside their
inputs."""

FARTHEST = 1 << 20
"""Largest stride from a token to the next: programs compute offsets within a tile in 32 bits."""


def kind(a: Tensor, b: Tensor) -> torch.dtype:
    """Return the type of an expression of both, by torch's promotion."""
    return torch.promote_types(a.dtype, b.dtype)


def by_token(x: Tensor) -> Tensor:
    """Return x [rows, length, width] with adjacent channels; a slice of wider tokens is kept."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= FARTHEST else x.contiguous()


def splits(tiles: int, others: int) -> tuple[int, int]:
    """Return the number of parts into which to cut `tiles`, for each of `others`, and the tiles of
    a part."""
    each = max(1, tiles * others // PROGRAMS)
    return -(-tiles // each), each


def turns(tiles: int, programs: int) -> tuple[int, int]:
    """Return how many programs (at most `programs`) share `tiles`, and the tiles of each."""
    each = max(1, -(-tiles // min(programs, PROGRAMS)))
    return -(-tiles // each), each


def row_tiles(width: int) -> tuple[int, int, int]:
    """Return, for a program that takes whole rows: their width as a power of two, the rows at a
    time, and the warps that share them (16 numbers for each thread, if possible)."""
    block = 1 << max(width - 1, 1).bit_length()
    rows = max(1, min(16, 2048 // block))
    return block, rows, min(max(rows * block // 512, 4), 32)
