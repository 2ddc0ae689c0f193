"""The exchange: every rank of an axis sends a piece to each other rank, and receives one from each.

All communication of context parallelism is built from it. An empty piece sends nothing, so a
message to one neighbour is an exchange too, with as many operations for any number of ranks. The
backward pass exchanges the gradients, from each receiver to its sender. Every rank takes part in
both passes, in the same order, because what a rank receives always enters its computation, even if
all of it is empty.

Gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .axes import Axis
from .collectives import all_to_all


def exchange(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis) -> list[Tensor]:
    """Send `pieces[r]` to rank r. Return the pieces received from the ranks, of these `shapes`,
    without empty ones unless all are empty."""
    if axis.size == 1:
        return list(pieces)
    sent = [piece.numel() for piece in pieces]
    due = [prod(shape) for shape in shapes]
    full = [piece.flatten() for piece in pieces if piece.numel()]
    flat = torch.cat(full) if full else pieces[0].flatten()
    received: Tensor = _Exchange.apply(flat, sent, due, axis)
    found = [(n, shape) for n, shape in zip(due, shapes, strict=True) if n or not any(due)]
    parts = received.split([n for n, _ in found])
    return [part.view(shape) for part, (_, shape) in zip(parts, found, strict=True)]


def exchange_rows(rows: Tensor, sent: Sequence[int], due: Sequence[int], axis: Axis) -> Tensor:
    """Send rows [number, width]: the first `sent[0]` to rank 0, the next `sent[1]` to rank 1, …
    Return the received rows, `due[r]` from rank r, in the order of ranks."""
    width = rows.shape[1]
    outgoing, incoming = ([number * width for number in numbers] for numbers in (sent, due))
    received: Tensor = _Exchange.apply(rows.flatten(), outgoing, incoming, axis)
    return received.view(-1, width)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], due: list[int], axis: Axis) -> Tensor:
        ctx.sent, ctx.due, ctx.axis = sent, due, axis
        return all_to_all(flat, due, sent, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, ctx.sent, ctx.due, ctx.axis), None, None, None


def whole_rows(x: Tensor, channels: Sequence[int], axis: Axis) -> Tensor:
    """From all channels of parts of rows to some channels of whole rows.

    [rows, part, all channels, …] → [rows, length, channels of this rank, …]; rank r has
    `channels[r]` of them. Each rank sends (N−1)/N of its part of the tensor.
    """
    if axis.size == 1:
        return x
    rows, part, _, *rest = x.shape
    own = channels[axis.rank]
    if len({*channels}) == 1:
        pieces = x.unflatten(2, (axis.size, own)).movedim(2, 0)
        return _alike(pieces, axis).transpose(0, 1).flatten(1, 2)
    shapes = [(rows, part, own, *rest)] * axis.size
    return torch.cat(exchange(x.split(list(channels), dim=2), shapes, axis), dim=1)


def own_parts(x: Tensor, channels: Sequence[int], axis: Axis) -> Tensor:
    """The reverse of `whole_rows`: all channels of this rank's part of the rows.

    [rows, length, channels of this rank, …] → [rows, part, all channels, …].
    """
    if axis.size == 1:
        return x
    rows, length, _, *rest = x.shape
    part = length // axis.size
    if len({*channels}) == 1:
        pieces = x.unflatten(1, (axis.size, part)).movedim(1, 0)
        return _alike(pieces, axis).movedim(0, 2).flatten(2, 3)
    shapes = [(rows, part, count, *rest) for count in channels]
    return torch.cat(exchange(x.split(part, dim=1), shapes, axis), dim=2)


def _alike(pieces: Tensor, axis: Axis) -> Tensor:
    """Exchange pieces [ranks, …] of one shape."""
    sizes = [pieces[0].numel()] * axis.size
    received: Tensor = _Exchange.apply(pieces.flatten(), sizes, sizes, axis)
    return received.view(pieces.shape)


def rearranged(
    x: Tensor, have: list[list[int]], want: list[list[int]], sizes: Sequence[int], axis: Axis
) -> Tensor:
    """Move chunks of rows from one arrangement to another.

    `have[r]` and `want[r]` are the numbers of the chunks that rank r holds before and after, in
    order; `sizes` are the chunks' lengths.
    """
    mine = dict(zip(have[axis.rank], x.split([sizes[n] for n in have[axis.rank]], 1), strict=True))
    going = [[n for n in have[axis.rank] if n in wanted] for wanted in want]
    coming = [[n for n in held if n in want[axis.rank]] for held in have]
    received = exchange(
        [_joined([mine[n] for n in numbers], x) for numbers in going],
        [(len(x), sum(sizes[n] for n in numbers), *x.shape[2:]) for numbers in coming],
        axis,
    )
    chunks: dict[int, Tensor] = {}
    full = [numbers for numbers in coming if any(sizes[n] for n in numbers)]
    for numbers, piece in zip(full, received, strict=True):
        chunks.update(zip(numbers, piece.split([sizes[n] for n in numbers], dim=1), strict=True))
    return _joined([chunks[n] for n in want[axis.rank] if sizes[n]], x)


def _joined(pieces: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the pieces of rows one after the other; without any, an empty part of x."""
    return torch.cat(list(pieces), dim=1) if pieces else x[:, :0]
