"""How kernels want their tensors, and how their work is cut."""

from __future__ import annotations

from torch import Tensor

PROGRAMS = 2048
"""Programs of a backward pass that sums over tokens, about: several for each multiprocessor of a
large GPU, and few enough that what each has summed is little beside what it has read."""


def by_token(x: Tensor) -> Tensor:
    """[rows, length, width] with the channels of a token side by side; a slice of them may be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def splits(tiles: int, others: int) -> tuple[int, int]:
    """Into how many parts to cut `tiles`, for each of `others`, and the tiles of a part."""
    each = max(1, tiles * others // PROGRAMS)
    return -(-tiles // each), each


def row_tiles(width: int) -> tuple[int, int, int]:
    """For rows that a program takes whole: their width as a power of two, how many at a time, and
    the warps that share them (16 numbers for each thread, where that can be)."""
    block = 1 << max(width - 1, 1).bit_length()
    rows = max(1, min(16, 2048 // block))
    return block, rows, min(max(rows * block // 512, 4), 16)
