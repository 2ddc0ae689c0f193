"""Expert parallelism: dispatch rows to the ranks with their experts, and combine the results.

    local rows, by expert ── all-to-all ──► rows of all ranks, by local expert ── products
    local rows, by expert ◄── all-to-all ── in the same order ◄───────────────────┘

A rank receives whatever the routers send, at most all rows on the axis. Rows that no expert takes
(beyond its capacity) come last: they are not sent, and their results are 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from .axes import Axis
from .exchange import exchange_rows


class ExpertExchange:
    """Dispatches a batch's rows to experts, and combines the results. On a single rank, rows
    stay."""

    def __init__(self, counts: Tensor, axis: Axis, *, drops: bool = False) -> None:
        """Exchange `counts` (int64 [experts]): this rank's rows per expert. `drops`: there may be
        rows that no expert takes. Collective."""
        self.axis = axis
        self.drops = drops
        self.counts = counts
        """Received rows per local expert."""
        self.host_counts: Tensor | None = None
        """`counts` in host memory, if the exchange read them."""
        self.received = self.num_rows = 0
        """Rows received by this rank, 0 on a single rank; and rows dispatched."""
        if axis.size == 1:
            return
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=axis.group)
        by_rank = torch.stack([counts, received_counts]).view(2, axis.size, -1)
        counts_on_host = by_rank.cpu()
        self.send_counts, self.recv_counts = counts_on_host.sum(dim=2).tolist()
        self.received = sum(self.recv_counts)
        self.host_counts = counts_on_host[1].sum(dim=0)
        received_counts = by_rank[1]
        self.counts = received_counts.sum(dim=0)
        experts = torch.arange(len(self.counts), device=counts.device).repeat(axis.size)
        row_experts = experts.repeat_interleave(
            received_counts.flatten(), output_size=self.received
        )
        self.by_expert = row_experts.argsort(stable=True)
        self.by_sender = torch.empty_like(self.by_expert)
        self.by_sender[self.by_expert] = torch.arange(self.received, device=counts.device)

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send rows [number, width], sorted by expert, to their experts. Return the local experts'
        rows, sorted by expert."""
        self.num_rows = len(rows)
        if self.axis.size == 1:
            return self.clear_dropped(rows)
        if self.drops:
            rows = rows[: sum(self.send_counts)]
        received = exchange_rows(rows, self.send_counts, self.recv_counts, self.axis)
        return permute(received, self.by_expert, self.by_sender)

    def combine(self, rows: Tensor) -> Tensor:
        """Send rows, ordered as `dispatch` returned them, back to their ranks and positions."""
        if self.axis.size == 1:
            return self.clear_dropped(rows)
        rows = permute(rows, self.by_sender, self.by_expert)
        returned = exchange_rows(rows, self.recv_counts, self.send_counts, self.axis)
        return F.pad(returned, (0, 0, 0, self.num_rows - len(returned))) if self.drops else returned

    def clear_dropped(self, rows: Tensor) -> Tensor:
        """Set rows that no expert takes to 0, and their gradients: products do not write them."""
        if not self.drops:
            return rows
        places = torch.arange(len(rows), device=rows.device)
        return rows.masked_fill((places >= self.counts.sum()).unsqueeze(1), 0)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return rows[order]; `inverse` undoes the permutation `order`."""
    result: Tensor = _Permutation.apply(rows, order, inverse)
    return result


class _Permutation(torch.autograd.Function):
    """A gather whose backward pass is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return out_grad[inverse], None, None
