"""Fragments: the ranges in logical tensors that a rank stores.

Engines cut the state differently. ZeRO concatenates parameters and gives ranks arbitrary ranges;
FSDP2 gives ranks rows. Both are row-major ranges in a tensor whose name and full shape all layouts
know; under tensor parallelism, ranges in the local shard.

    weight [5, 4]          a ZeRO rank holds elements 6 … 17          as boxes
    ┌─────────┐            ┌─────────┐
    │ · · · · │            │ · · · · │
    │ · · · · │            │ · · █ █ │                                [1, 2:4]
    │ · · · · │            │ █ █ █ █ │                                [2:4, 0:4]
    │ · · · · │            │ █ █ █ █ │
    │ · · · · │            │ █ █ · · │                                [4, 0:2]
    └─────────┘            └─────────┘

A checkpoint stores boxes, so that a reader with a different cut finds its elements.
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
"""Maximum elements in a stored box: a reader loads the full box to use any element."""


@dataclass(frozen=True)
class Box:
    """A rectangular region in a tensor."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the box from its tensor."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)


@dataclass(frozen=True)
class Fragment:
    """A range in a logical tensor, in live memory."""

    key: str
    """`master.<parameter>`, or `<state>.<parameter>` for an optimizer's state tensor."""
    shard: LocalShard
    """This rank's local shard; without tensor parallelism, the full logical tensor."""
    start: int
    """Row-major index in the local shard at which the range starts."""
    data: torch.Tensor
    """The elements [n], a view into the engine's memory."""
    writes: bool = True
    """True if this rank stores the range and counts it in the norm; a single replica does."""

    @property
    def shape(self) -> Shape:
        """Shape of the logical tensor."""
        return self.shard.shape

    @property
    def kind(self) -> str:
        """`master`, `ema`, or the name that an optimizer gives a state tensor."""
        return self.key.partition(".")[0]

    @property
    def parameter(self) -> str:
        return self.key.partition(".")[2]

    def with_data(self, data: torch.Tensor) -> Fragment:
        """Return the same range in other memory. (A step has hundreds, and `replace` is slow.)"""
        fragment = object.__new__(Fragment)
        fragment.__dict__.update(self.__dict__, data=data)
        return fragment

    def take(self, tensor: torch.Tensor) -> None:
        """Copy this range from the logical tensor."""
        for box, view in self.boxes():
            view.copy_(tensor[box.slices])

    def give(self, tensor: torch.Tensor) -> None:
        """Copy this range into the logical tensor."""
        for box, view in self.boxes():
            tensor[box.slices] = view

    def boxes(self, cap: int = CAP) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield the range as boxes in the logical tensor, with views of their elements."""
        position = 0
        for box in cover(self.shard.local, self.start, self.start + self.data.numel(), cap):
            view = self.data.narrow(0, position, box.numel).view(box.sizes)
            position += box.numel
            yield from split_by_runs(box, view, self.shard)


def split_by_runs(
    box: Box, view: torch.Tensor, shard: LocalShard
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Map a box in a local shard to boxes in the logical tensor, one for each run it intersects."""
    if shard.runs is None:
        yield box, view
        return
    dim = shard.dim
    start, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    run_start = 0
    for run in shard.runs:
        low, high = max(start, run_start), min(end, run_start + len(run))
        if low < high:
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = run.start + low - run_start, high - low
            yield Box(tuple(offsets), tuple(sizes)), view.narrow(dim, low - start, high - low)
        run_start += len(run)


def cover(shape: Shape, start: int, end: int, cap: int) -> Iterator[Box]:
    """Yield the row-major range [start, end) in a tensor as boxes with at most `cap` elements."""
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row_size = math.prod(shape[1:])
    while start < end:
        row, column = divmod(start, row_size)
        full_rows = (end - start) // row_size if column == 0 else 0
        if full_rows and row_size <= cap:
            rows = min(full_rows, cap // row_size)
            yield Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            start += rows * row_size
        else:
            stop = min(end, (row + 1) * row_size)
            for box in cover(shape[1:], column, column + stop - start, cap):
                yield Box((row, *box.offsets), (1, *box.sizes))
            start = stop


def masters(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Select the master weights."""
    return [fragment for fragment in fragments if fragment.kind == MASTER]


def averages(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Select the weights' moving averages, in the order of the masters."""
    return [fragment for fragment in fragments if fragment.kind == AVERAGE]


def pair_averages(fragments: Sequence[Fragment]) -> Iterator[tuple[Fragment, Fragment]]:
    """Yield moving averages with their masters. Frozen parameters have none."""
    moving = averages(fragments)
    parameters = {average.parameter for average in moving}
    averaged = [master for master in masters(fragments) if master.parameter in parameters]
    yield from zip(moving, averaged, strict=True)


def begin_averages(fragments: Sequence[Fragment]) -> None:
    """Set the moving averages, if there are any, to the weights."""
    for average, weight in pair_averages(fragments):
        average.data.copy_(weight.data)
