"""The exchange: every process of an axis gives a piece to each of the others, and gets one back.

All that operators say to each other is made of it. A piece may be empty: then nothing is sent, so
that a message to one neighbour is an exchange as well. Its backward pass is the exchange of the
gradients, from each receiver to its sender; every process takes part in both, and in the same
order, because what a process receives is always part of what it computes, be it empty.

Gradients are those of the sum of all processes' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .axes import Axis


def exchange(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis) -> list[Tensor]:
    """`pieces[r]` goes to rank r. Returns what each rank sent to us; `shapes` are theirs."""
    if axis.size == 1:
        return list(pieces)
    sent = [piece.numel() for piece in pieces]
    due = [prod(shape) for shape in shapes]
    flat = torch.cat([piece.flatten().unsqueeze(0) for piece in pieces], dim=1).squeeze(0)
    received: Tensor = _Exchange.apply(flat, sent, due, axis.group)
    parts = received.split(due)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sent: list[int], due: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.due, ctx.group = sent, due, group
        return _send(flat, sent, due, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(gradient, ctx.due, ctx.sent, ctx.group), None, None, None


def _send(flat: Tensor, sent: list[int], due: list[int], group: Any) -> Tensor:
    received = flat.new_empty(sum(due))
    dist.all_to_all_single(received, flat.contiguous(), due, sent, group=group)
    return received


def whole_rows(pieces: Sequence[Tensor], axis: Axis) -> Tensor:
    """Some channels of every part of a row, to a process that wants those of whole rows.

    `pieces[r]` [rows, part, those that rank r wants, …] → [rows, length, those that we want, …].
    Each process sends what it does not keep itself: (N−1)/N of a tensor that is divided by N.
    """
    shape = pieces[axis.rank].shape
    parts = exchange(pieces, [shape] * axis.size, axis)
    return parts[0] if axis.size == 1 else torch.cat(parts, dim=1)


def own_parts(x: Tensor, channels: Sequence[int], axis: Axis) -> Tensor:
    """The reverse: all channels of our part of the row, from those who have some of whole rows.

    [rows, length, ours, …] → [rows, part, all, …]; rank r has `channels[r]` of them.
    """
    rows, length = x.shape[:2]
    part = length // axis.size
    shapes = [(rows, part, count, *x.shape[3:]) for count in channels]
    parts = exchange(x.split(part, dim=1), shapes, axis)
    return parts[0] if axis.size == 1 else torch.cat(parts, dim=2)


def rearranged(
    x: Tensor, have: list[list[int]], want: list[list[int]], sizes: Sequence[int], axis: Axis
) -> Tensor:
    """Chunks of rows from one arrangement into another.

    `have[r]` and `want[r]` number the chunks that rank r holds, one after the other, before and
    after; `sizes` are the chunks' lengths.
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
