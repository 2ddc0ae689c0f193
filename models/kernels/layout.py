"""How kernels want their tensors, and how their work is cut."""

from __future__ import annotations

import torch
from torch import Tensor

PROGRAMS = 2048
"""Programs of a backward pass that sums over tokens, about: several for each multiprocessor of a
large GPU, and few enough that what each has summed is little beside what it has read."""

FARTHEST = 1 << 20
"""From a token to the next: programs count from the start of a tile, in 32 bits."""


def kind(a: Tensor, b: Tensor) -> torch.dtype:
    """The type of what both are parts of, as everywhere in torch."""
    return torch.promote_types(a.dtype, b.dtype)


def by_token(x: Tensor) -> Tensor:
    """[rows, length, width] with the channels of a token side by side; a slice of them may be."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= FARTHEST else x.contiguous()


def splits(tiles: int, others: int) -> tuple[int, int]:
    """Into how many parts to cut `tiles`, for each of `others`, and the tiles of a part."""
    each = max(1, tiles * others // PROGRAMS)
    return -(-tiles // each), each


def turns(tiles: int, programs: int) -> tuple[int, int]:
    """How many programs, of at most so many, take `tiles`, and how many of them each."""
    each = max(1, -(-tiles // min(programs, PROGRAMS)))
    return -(-tiles // each), each


def row_tiles(width: int) -> tuple[int, int, int]:
    """For rows that a program takes whole: their width as a power of two, how many at a time, and
    the warps that share them (16 numbers for each thread, where that can be)."""
    block = 1 << max(width - 1, 1).bit_length()
    rows = max(1, min(16, 2048 // block))
    return block, rows, min(max(rows * block // 512, 4), 32)
