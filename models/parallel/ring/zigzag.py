"""Arrangement of rows for a ring: each rank holds an early and a late chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..axes import Axis
from ..exchange import rearrange_chunks
from ..tiles import TILE


@dataclass(frozen=True)
class RowChunk:
    """A rank's chunk: positions [start, end) in the row."""

    offset: int
    """Index of `start` in the rank's tensors."""
    start: int
    end: int


class Zigzag:
    """Arrangement in which rank r holds chunks r and 2N−1−r."""

    def __init__(self, local_length: int, axis: Axis) -> None:
        self.axis = axis
        ranks = range(axis.size)
        self.sizes = [local_length - local_length // 2, local_length // 2] * axis.size
        self.contiguous = [[2 * rank, 2 * rank + 1] for rank in ranks]
        self.zigzag = [[rank, 2 * axis.size - 1 - rank] for rank in ranks]

    def deal(self, x: Tensor) -> Tensor:
        """Rearrange contiguous parts x [rows, local_length, …] into the zigzag."""
        return rearrange_chunks(x, self.contiguous, self.zigzag, self.sizes, self.axis)

    def collect(self, x: Tensor) -> Tensor:
        """Reverse `deal`."""
        return rearrange_chunks(x, self.zigzag, self.contiguous, self.sizes, self.axis)

    def chunks(self, rank: int) -> list[RowChunk]:
        chunks, offset = [], 0
        for number in self.zigzag[rank]:
            start = sum(self.sizes[:number])
            chunks.append(RowChunk(offset, start, start + self.sizes[number]))
            offset += self.sizes[number]
        return chunks

    def index(self, device: torch.device) -> Tensor:
        """Return this rank's row positions, int64 [local_length]."""
        chunks = self.chunks(self.axis.rank)
        return torch.cat([torch.arange(chunk.start, chunk.end, device=device) for chunk in chunks])


def split_query_tiles(zigzag: Zigzag) -> list[RowChunk]:
    """Split this rank's chunks into query tiles, whose scores are in memory at once."""
    return [
        RowChunk(
            chunk.offset + start, chunk.start + start, min(chunk.start + start + TILE, chunk.end)
        )
        for chunk in zigzag.chunks(zigzag.axis.rank)
        for start in range(0, chunk.end - chunk.start, TILE)
    ]
