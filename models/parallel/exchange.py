"""The exchange: every rank of an axis sends a piece to each other rank, and receives one from each.

All communication of context parallelism is built from it. An empty piece sends nothing, so a
message to one neighbour is an exchange too. The backward pass exchanges the gradients, from each
receiver to its sender. Every rank takes part in both passes, in the same order, because what a
rank receives always enters its computation, even if empty.

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
    """Send `pieces[r]` to rank r. Return the pieces received from each rank, of these `shapes`."""
    if axis.size == 1:
        return list(pieces)
    sent = [piece.numel() for piece in pieces]
    due = [prod(shape) for shape in shapes]
    flat = torch.cat([piece.flatten().unsqueeze(0) for piece in pieces], dim=1).squeeze(0)
    received: Tensor = _Exchange.apply(flat, sent, due, axis)
    pieces = received.split(due)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


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


def whole_rows(pieces: Sequence[Tensor], axis: Axis) -> Tensor:
    """From all channels of parts of rows to some channels of whole rows.

    `pieces[r]` [rows, part, channels of rank r, …] → [rows, length, channels of this rank, …].
    Each rank sends (N−1)/N of its part of the tensor.
    """
    shape = pieces[axis.rank].shape
    parts = exchange(pieces, [shape] * axis.size, axis)
    return parts[0] if axis.size == 1 else torch.cat(parts, dim=1)


def own_parts(x: Tensor, channels: Sequence[int], axis: Axis) -> Tensor:
    """The reverse of `whole_rows`: all channels of this rank's part of the rows.

    [rows, length, channels of this rank, …] → [rows, part, all channels, …]; rank r has
    `channels[r]` of them.
    """
    if axis.size == 1:
        return x
    rows, length = x.shape[:2]
    part = length // axis.size
    shapes = [(rows, part, count, *x.shape[3:]) for count in channels]
    return torch.cat(exchange(x.split(part, dim=1), shapes, axis), dim=2)


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
    nothing = x[:, :0]
    received = exchange(
        [torch.cat([nothing, *(mine[n] for n in numbers)], dim=1) for numbers in going],
        [(len(x), sum(sizes[n] for n in numbers), *x.shape[2:]) for numbers in coming],
        axis,
    )
    chunks: dict[int, Tensor] = {}
    for numbers, piece in zip(coming, received, strict=True):
        chunks.update(zip(numbers, piece.split([sizes[n] for n in numbers], dim=1), strict=True))
    return torch.cat([chunks[n] for n in want[axis.rank]], dim=1)
