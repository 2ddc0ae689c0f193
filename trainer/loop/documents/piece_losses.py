"""Sum a step's losses by piece: a document's part of a row.

    losses by token, on the device ─┐
    bounds of the pieces, on the host ─► Σ w·ℓ, Σ w by piece, on the device ─► added over cp and tp

Every rank of a row knows all of its pieces; of a piece, each adds the tokens that it holds. Nothing
waits for the device: the sums travel to the host with the step's other results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....dataplane.arrays import Int64
from ....dataplane.runlog.document_losses import PieceLoss
from ....models.config.options.names import Divisor
from ....models.documents import copy_async
from ....models.parallel.tensor import reduce
from ...engines.objective import divisor_terms
from ...layout.groups import Parallel
from ..batches import PADDING, MicroBatch

Float64 = np.ndarray[Any, np.dtype[np.float64]]
NO_PIECES, NO_WEIGHTS = np.empty(0, np.int64), np.empty(0)


@dataclass(frozen=True, eq=False)
class StepPieces:
    """The pieces in this rank's rows of a step."""

    rows: Int64
    """[pieces] Row numbers; PADDING in padding rows."""
    firsts: Int64
    """[pieces] First token, counted in the row."""
    weights: Float64
    """[pieces] Divisors of the tokens that this rank counts."""
    sums: torch.Tensor
    """fp64 Σ w·ℓ by piece, of all ranks that hold the rows; if there are several, then their
    divisors. On the device."""

    @classmethod
    def empty(cls, device: torch.device) -> StepPieces:
        """Return the pieces of a rank that computes no loss."""
        return cls(
            NO_PIECES, NO_PIECES, NO_WEIGHTS, torch.zeros(0, dtype=torch.float64, device=device)
        )

    @classmethod
    def sum(
        cls,
        batches: Sequence[MicroBatch],
        token_losses: Sequence[torch.Tensor],
        parallel: Parallel,
        divisor: Divisor,
    ) -> StepPieces:
        """Sum the losses of micro-batches by piece. Collective over the context and tensor axes."""
        if not token_losses:
            return cls.empty(parallel.device)
        bounds = [_Bounds.of(batch, parallel) for batch in batches]
        offsets, num_tokens = [], 0
        for piece_bounds, losses in zip(bounds, token_losses, strict=True):
            offsets.append(num_tokens + piece_bounds.offsets(losses.shape[1], parallel))
            num_tokens += losses.numel()
        weights = [
            piece_bounds.sum_weights(batch, divisor, parallel)
            for piece_bounds, batch in zip(bounds, batches, strict=True)
        ]
        # A batch's last offset is the next batch's first.
        edges = np.concatenate([*(part[:-1] for part in offsets), [num_tokens]])
        device_edges = copy_async(torch.from_numpy(edges), parallel.device)
        values = token_losses[0].reshape(-1)
        if len(token_losses) > 1:  # a launch less without
            values = torch.cat([losses.reshape(-1) for losses in token_losses])
        values = values.double()
        sums = torch.segment_reduce(values, "sum", offsets=device_edges, unsafe=True)
        local_weights = np.concatenate(weights)
        axes = [axis for axis in (parallel.axes.tensor, parallel.axes.context) if axis.size > 1]
        if axes:
            device_weights = copy_async(torch.from_numpy(local_weights), parallel.device)
            sums = torch.cat([sums, device_weights])
            with torch.no_grad():
                for axis in axes:
                    sums = reduce(sums, axis)
        return cls(
            np.concatenate([piece_bounds.rows for piece_bounds in bounds]),
            np.concatenate([piece_bounds.firsts for piece_bounds in bounds]),
            local_weights,
            sums,
        )

    def losses(self, sums: torch.Tensor, max_pieces: int | None = None) -> list[PieceLoss]:
        """Return the losses of the pieces that have weight, from `sums` in host memory, in the
        order of `order_pieces`."""
        losses, weights = sums.numpy(), self.weights
        if len(losses) > len(weights):
            losses, weights = losses.reshape(2, -1)
        counted = np.flatnonzero((weights != 0) & (self.rows != PADDING))
        columns = [column[counted] for column in (self.rows, self.firsts, losses, weights)]
        rank = np.where(np.isfinite(columns[2]), -columns[2], -np.inf)
        order = np.lexsort([columns[1], columns[0], rank])[:max_pieces]
        lists = (column[order].tolist() for column in columns)
        return [PieceLoss(*piece) for piece in zip(*lists, strict=True)]


@dataclass(frozen=True, eq=False)
class _Bounds:
    """The pieces of a micro-batch's rows."""

    length: int
    """Tokens of a whole row of the model, into several of which a row of the plan may be cut."""
    ends: Int64
    """[pieces + 1] Starts in whole rows laid side by side, then the end."""
    rows: Int64
    firsts: Int64

    @classmethod
    def of(cls, batch: MicroBatch, parallel: Parallel) -> _Bounds:
        rows = np.asarray(batch.rows)
        length = batch.tokens.shape[1] * parallel.axes.context.size
        indices, firsts = np.divmod(batch.documents[:-1], batch.documents[-1] // len(rows))
        return cls(length, batch.documents, rows[indices], firsts)

    def offsets(self, width: int, parallel: Parallel) -> Int64:
        """Return the bounds in rows cut to the `width` tokens that this rank holds."""
        context, tensor = parallel.axes.context, parallel.axes.tensor
        first = context.part_range(self.length).start
        if width * context.size < self.length:
            first += tensor.part_range(self.length // context.size).start
        indices, columns = np.divmod(self.ends, self.length)
        return indices * width + np.clip(columns - first, 0, width)

    def sum_weights(self, batch: MicroBatch, divisor: Divisor, parallel: Parallel) -> Float64:
        """Return the divisors of the pieces' tokens that this rank counts, fp64 [pieces]."""
        sums = np.zeros(len(self.rows))
        if parallel.counts_tokens:
            terms = divisor_terms(batch.weights, divisor).numpy().reshape(-1)
            offsets = self.offsets(batch.weights.shape[1], parallel)
            held = np.flatnonzero(np.diff(offsets))  # `reduceat` knows no empty pieces
            sums[held] = np.add.reduceat(terms, offsets[held], dtype=np.float64)
        return sums
