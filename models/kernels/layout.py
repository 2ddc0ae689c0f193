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
