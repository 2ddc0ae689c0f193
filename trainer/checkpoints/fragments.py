"""Fragments: the ranges of logical tensors that a rank holds.

Engines cut the state differently. ZeRO lays parameters end to end and gives each rank a range that
begins and ends anywhere; FSDP2 gives each rank rows. Both are row-major ranges of a tensor whose
name and whole shape all layouts know; under tensor parallelism, ranges of the local shard.

    weight [5, 4]          a ZeRO rank holds elements 6 … 17          as boxes
    ┌─────────┐            ┌─────────┐
    │ · · · · │            │ · · · · │
    │ · · · · │            │ · · █ █ │                                [1, 2:4]
    │ · · · · │            │ █ █ █ █ │                                [2:4, 0:4]
    │ · · · · │            │ █ █ █ █ │
    │ · · · · │            │ █ █ · · │                                [4, 0:2]
    └─────────┘            └─────────┘

A checkpoint stores boxes, so that a reader with any other cut finds its elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...models.parallel.local_shard import LocalShard
from .kinds import AVERAGE, MASTER

Shape = tuple[int, ...]


CAP = 1 << 22
"""Maximum elements of a stored box: a reader loads a whole box to use any part of it."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in its tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)


@dataclass(frozen=True)
class Fragment:
    """A range of one logical tensor, in live memory."""

    key: str
    """`master.<parameter>`, or `<state>.<parameter>` of an optimizer's state tensor."""
    shard: LocalShard
    """This rank's local shard of the logical tensor: all of it, without tensor parallelism."""
    start: int
    """Index of the range's first element in the local shard, in row-major order."""
    data: torch.Tensor
    """The elements: a one-dimensional view of the engine's own memory."""
    writes: bool = True
    """True if this rank stores the range and counts it in the norm; one replica does."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole logical tensor."""
        return self.shard.shape

    @property
    def kind(self) -> str:
        """`master`, `ema`, or the name of an optimizer's state tensor."""
        return self.key.partition(".")[0]

    @property
    def parameter(self) -> str:
        return self.key.partition(".")[2]

    def take(self, whole: torch.Tensor) -> None:
        """Copy this range from the whole tensor."""
        for box, view in self.boxes():
            view.copy_(whole[box.slices])

    def give(self, whole: torch.Tensor) -> None:
        """Copy this range into the whole tensor."""
        for box, view in self.boxes():
            whole[box.slices] = view

    def boxes(self, cap: int = CAP) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the range as boxes of the logical tensor, each with a view of its elements."""
        taken = 0
        for box in cover(self.shard.local, self.start, self.start + self.data.numel(), cap):
            view = self.data.narrow(0, taken, box.numel).view(box.sizes)
            taken += box.numel
            yield from placed(box, view, self.shard)


def placed(box: Box, view: torch.Tensor, shard: LocalShard) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield a box of a local shard as boxes of the logical tensor, one for each run it meets."""
    if shard.runs is None:
        yield box, view
        return
    dim = shard.dim
    first, last = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    begin = 0
    for run in shard.runs:
        low, high = max(first, begin), min(last, begin + len(run))
        if low < high:
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = run.start + low - begin, high - low
            yield Box(tuple(offsets), tuple(sizes)), view.narrow(dim, low - first, high - low)
        begin += len(run)


def cover(shape: Shape, start: int, end: int, cap: int) -> Iterator[Box]:
    """Yield the row-major range [start, end) of a tensor as boxes of at most `cap` elements."""
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    while start < end:
        index, inside = divmod(start, row)
        whole = (end - start) // row if inside == 0 else 0
        if whole and row <= cap:
            rows = min(whole, cap // row)
            yield Box((index, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            start += rows * row
        else:
            stop = min(end, (index + 1) * row)
            for box in cover(shape[1:], inside, inside + stop - start, cap):
                yield Box((index, *box.offsets), (1, *box.sizes))
            start = stop


def masters(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Return the fragments of the master weights."""
    return [each for each in fragments if each.kind == MASTER]


def averages(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Return the fragments of the moving averages of the weights, in the order of the masters."""
    return [each for each in fragments if each.kind == AVERAGE]


def averaged(fragments: Sequence[Fragment]) -> Iterator[tuple[Fragment, Fragment]]:
    """Yield each moving average with its master. Frozen parameters have none."""
    moving = averages(fragments)
    names = {average.parameter for average in moving}
    moved = [master for master in masters(fragments) if master.parameter in names]
    yield from zip(moving, moved, strict=True)


def begin_averages(fragments: Sequence[Fragment]) -> None:
    """Set the moving averages, if there are any, to the weights."""
    for average, weight in averaged(fragments):
        average.data.copy_(weight.data)
