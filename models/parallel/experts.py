"""Expert parallelism: rows travel to the ranks that hold their experts, and back.

    rows of this rank, by expert ── all-to-all ──► rows of all ranks, by own expert ── products
    rows of this rank, by expert ◄── all-to-all ── the same order ◄─────────────────────┘

Every row arrives: no rank has a limit of rows. So a rank receives as many as the routers send it,
at most all rows of the axis.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .axes import Axis
from .exchange import exchange_rows


class Trip:
    """The way of a batch of rows to its experts and back. On an axis of one rank, rows stay."""

    def __init__(self, counts: Tensor, axis: Axis) -> None:
        """`counts` (int64 [experts]) are the rows of this rank for each expert. Collective."""
        self.axis = axis
        self.counts = counts
        """Rows of each expert of this rank."""
        self.on_host: Tensor | None = None
        """The same in host memory, if the trip read them."""
        self.received = 0
        """Rows that this rank received; 0 on an axis of one rank."""
        if axis.size == 1:
            return
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=axis.group)
        by_rank = torch.stack([counts, coming]).view(2, axis.size, -1)
        read = by_rank.cpu()
        self.sent, self.due = read.sum(dim=2).tolist()
        self.received = sum(self.due)
        self.on_host = read[1].sum(dim=0)
        coming = by_rank[1]
        self.counts = coming.sum(dim=0)
        experts = torch.arange(len(self.counts), device=counts.device).repeat(axis.size)
        of_row = experts.repeat_interleave(coming.flatten(), output_size=self.received)
        self.by_expert = of_row.argsort(stable=True)
        self.by_sender = torch.empty_like(self.by_expert)
        self.by_sender[self.by_expert] = torch.arange(self.received, device=counts.device)

    def there(self, rows: Tensor) -> Tensor:
        """Send rows [number, width], sorted by expert. Return the rows of this rank's experts,
        sorted by expert."""
        if self.axis.size == 1:
            return rows
        arrived = exchange_rows(rows, self.sent, self.due, self.axis)
        return permuted(arrived, self.by_expert, self.by_sender)

    def back(self, rows: Tensor) -> Tensor:
        """Return rows, in the order of `there`, to the ranks and in the order they came from."""
        if self.axis.size == 1:
            return rows
        rows = permuted(rows, self.by_sender, self.by_expert)
        return exchange_rows(rows, self.due, self.sent, self.axis)


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows[order]; `inverse` undoes the permutation `order`."""
    result: Tensor = _Permuted.apply(rows, order, inverse)
    return result


class _Permuted(torch.autograd.Function):
    """A gather whose backward pass is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None
