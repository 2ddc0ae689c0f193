"""The two ends of a model: token ids → vectors, and vectors → logits or their loss.

Tied embeddings are one table used by both. Tensor parallelism shards a table by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.options.names import Kernel
from ..kernels.choice import uses_kernel
from ..operators import BatchContext
from ..parallel.axes import Axis
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import gather, scatter
from .loss import LossParts, fused_loss, row_losses


class EmbeddingTable(nn.Module):
    """A weight [rows, width] and nothing else; `use(x, weight)` says what a call computes.

    The weight is read inside this module's call only: there ZeRO-3 has gathered it, for the
    embedding and for a head tied to it.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, x: Tensor, use: Callable[[Tensor, Tensor], Any]) -> Any:
        return use(x, self.weight)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {"weight": Sharded(0)}


@dataclass(frozen=True)
class Embedding:
    """u = multiplier · tokens[id], plus positions[position] with learned positions."""

    tokens: EmbeddingTable
    positions: EmbeddingTable | None = None
    multiplier: float = 1.0

    def __call__(self, ids: Tensor, batch: BatchContext) -> Tensor:
        """Embed ids [rows, length]; return this rank's tokens of u, [rows, length / tp, width]."""
        axis = batch.axes.tensor
        u = look_up_rows(self.tokens, ids, axis)
        if self.multiplier != 1:
            u = u * self.multiplier
        if self.positions is not None:
            u = u + look_up_rows(self.positions, batch.positions, axis)
        return scatter(u, axis)


@dataclass(frozen=True)
class Unembedding:
    """logits = multiplier · hidden · tableᵀ, and their loss."""

    table: EmbeddingTable
    kernel: Kernel = "auto"
    multiplier: float = 1.0

    def logits(self, hidden: Tensor, axis: Axis) -> Tensor:
        """Return logits [rows, length, vocab_size / tp], this rank's vocabulary shard; hidden
        [rows, length / tp, width]."""
        logits: Tensor = self.table(gather(self._scale(hidden), axis), F.linear)
        return logits

    def _scale(self, hidden: Tensor) -> Tensor:
        return hidden if self.multiplier == 1 else hidden * self.multiplier

    def loss(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, z_loss: float, axis: Axis
    ) -> tuple[Tensor, LossParts]:
        """Return Σ w·ℓ; and, without gradients, its parts; both are this rank's share.

        The fused kernel never materialises all logits; plain torch holds a row's at a time.
        """
        options: dict[str, Any] = {
            "z_loss": z_loss,
            "axis": axis,
            "vocab_size": self.table.rows,
        }
        if uses_kernel(self.kernel, "linear_cross_entropy", hidden):
            compute_loss = partial(fused_loss, targets=targets, weights=weights, **options)
            total, row_sums, tokens = self.table(gather(self._scale(hidden), axis), compute_loss)
            return total, LossParts(row_sums[0], row_sums[1], tokens)
        per_row = zip(self.logits(hidden, axis), targets, weights, strict=True)
        losses = (row_losses(*row, **options) for row in per_row)
        totals, row_sums, token_losses = zip(*losses, strict=True)
        rows, penalties = torch.stack(row_sums, dim=1).unbind()
        return torch.stack(totals).sum(), LossParts(rows, penalties, torch.stack(token_losses))


def look_up_rows(table: EmbeddingTable, ids: Tensor, axis: Axis) -> Tensor:
    """Return table rows [..., width] for ids [...]. Where `axis` shards the table, results must be
    summed over its ranks."""
    if axis.size == 1:
        rows: Tensor = table(ids, F.embedding)
        return rows
    local_ids = axis.part_range(table.rows)
    is_local = (ids >= local_ids.start) & (ids < local_ids.stop)
    rows = table(torch.where(is_local, ids - local_ids.start, 0), F.embedding)
    return rows * is_local.unsqueeze(-1)
