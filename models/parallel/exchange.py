"""Differentiable all-to-all: every rank on an axis sends a piece to every rank.

All context-parallel communication is built from it. An empty piece sends nothing, so a message to a
neighbour is an exchange too, with the same number of operations for any rank count. The backward
pass returns gradients from receivers to senders. Every rank takes part in both passes, in the same
order, because received pieces always enter the computation, even if all are empty.

The differentiated loss is the sum over all ranks.
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
    """Send `pieces[r]` to rank r, and return the received pieces in rank order: `shapes[r]` from
    rank r. Empty pieces are left out unless all are empty."""
    if axis.size == 1:
        return list(pieces)
    send_sizes = [piece.numel() for piece in pieces]
    recv_sizes = [prod(shape) for shape in shapes]
    nonempty = [piece.flatten() for piece in pieces if piece.numel()]
    flat = torch.cat(nonempty) if nonempty else pieces[0].flatten()
    received: Tensor = _Exchange.apply(flat, send_sizes, recv_sizes, axis)
    nonempty_shapes = [
        (size, shape)
        for size, shape in zip(recv_sizes, shapes, strict=True)
        if size or not any(recv_sizes)
    ]
    received_pieces = received.split([size for size, _ in nonempty_shapes])
    return [
        piece.view(shape)
        for piece, (_, shape) in zip(received_pieces, nonempty_shapes, strict=True)
    ]


def exchange_rows(
    rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], axis: Axis
) -> Tensor:
    """Send rows [number, width]: the first `send_counts[0]` to rank 0, the next `send_counts[1]` to
    rank 1, … Return the received rows in rank order: `recv_counts[r]` from rank r."""
    width = rows.shape[1]
    send_sizes, recv_sizes = (
        [count * width for count in counts] for counts in (send_counts, recv_counts)
    )
    received: Tensor = _Exchange.apply(rows.flatten(), send_sizes, recv_sizes, axis)
    return received.view(-1, width)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, send_sizes: list[int], recv_sizes: list[int], axis: Axis
    ) -> Tensor:
        ctx.send_sizes, ctx.recv_sizes, ctx.axis = send_sizes, recv_sizes, axis
        return all_to_all(flat, recv_sizes, send_sizes, axis)

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(out_grad, ctx.send_sizes, ctx.recv_sizes, ctx.axis), None, None, None


def gather_rows(x: Tensor, channels: Sequence[int], axis: Axis) -> Tensor:
    """Gather full rows and scatter channels.

    x [rows, local_length, channels, …] → [rows, length, local_channels, …]; rank r gets
    `channels[r]` channels. Each rank sends (N−1)/N of its x.
    """
    if axis.size == 1:
        return x
    rows, local_length, _, *dims = x.shape
    num_local = channels[axis.rank]
    if len({*channels}) == 1:
        pieces = x.unflatten(2, (axis.size, num_local)).movedim(2, 0)
        return _exchange_equal(pieces, axis).transpose(0, 1).flatten(1, 2)
    shapes = [(rows, local_length, num_local, *dims)] * axis.size
    return torch.cat(exchange(x.split(list(channels), dim=2), shapes, axis), dim=1)


def scatter_rows(x: Tensor, channels: Sequence[int], axis: Axis) -> Tensor:
    """Reverse `gather_rows`.

    x [rows, length, local_channels, …] → [rows, local_length, channels, …].
    """
    if axis.size == 1:
        return x
    rows, length, _, *dims = x.shape
    local_length = length // axis.size
    if len({*channels}) == 1:
        pieces = x.unflatten(1, (axis.size, local_length)).movedim(1, 0)
        return _exchange_equal(pieces, axis).movedim(0, 2).flatten(2, 3)
    shapes = [(rows, local_length, count, *dims) for count in channels]
    return torch.cat(exchange(x.split(local_length, dim=1), shapes, axis), dim=2)


def _exchange_equal(pieces: Tensor, axis: Axis) -> Tensor:
    """Exchange equal-shaped pieces, [ranks, …]."""
    sizes = [pieces[0].numel()] * axis.size
    received: Tensor = _Exchange.apply(pieces.flatten(), sizes, sizes, axis)
    return received.view(pieces.shape)


def rearrange_chunks(
    x: Tensor, source: list[list[int]], target: list[list[int]], sizes: Sequence[int], axis: Axis
) -> Tensor:
    """Move row chunks between ranks.

    `source[r]` and `target[r]` list rank r's chunks before and after, in order; `sizes` are chunk
    lengths.
    """
    local_chunks = dict(
        zip(source[axis.rank], x.split([sizes[n] for n in source[axis.rank]], 1), strict=True)
    )
    outgoing = [[n for n in source[axis.rank] if n in remote] for remote in target]
    incoming = [[n for n in remote if n in target[axis.rank]] for remote in source]
    received = exchange(
        [_concatenate([local_chunks[n] for n in numbers], x) for numbers in outgoing],
        [(len(x), sum(sizes[n] for n in numbers), *x.shape[2:]) for numbers in incoming],
        axis,
    )
    chunks: dict[int, Tensor] = {}
    nonempty = [numbers for numbers in incoming if any(sizes[n] for n in numbers)]
    for numbers, piece in zip(nonempty, received, strict=True):
        chunks.update(zip(numbers, piece.split([sizes[n] for n in numbers], dim=1), strict=True))
    return _concatenate([chunks[n] for n in target[axis.rank] if sizes[n]], x)


def _concatenate(pieces: Sequence[Tensor], x: Tensor) -> Tensor:
    """Concatenate pieces along the rows; without pieces, return x's empty slice."""
    return torch.cat(list(pieces), dim=1) if pieces else x[:, :0]
