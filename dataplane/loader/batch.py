"""Micro-batches: tensors of a rank's rows, padded to one size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .rank_rows import LoadedGroup

if TYPE_CHECKING:
    import torch

PADDING = -1
ToTensor = Callable[[npt.NDArray[Any]], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch: B rows with L tokens.

    Where a step's rows have one length (`Plan.lengths`), a row of the plan may be several of them.
    """

    tokens: torch.Tensor
    """int64 [B, L]; with context parallelism [B, L / N], this rank's columns."""
    targets: torch.Tensor
    """int64, shape as `tokens`."""
    weights: torch.Tensor
    """float32, shape as `tokens`; 0 for masked targets and in padding rows."""
    cu_seqlens: torch.Tensor
    """int32 [documents + 1] Document starts in the B·L tokens laid side by side, then B·L. Covers
    whole rows on every context rank, because documents cross the cuts."""
    documents: Int64
    """[documents + 1] As `cu_seqlens`, also where documents are not isolated."""
    rows: Int64
    """Row numbers in the stream, by row of the plan; PADDING in padding rows."""
    sources: npt.NDArray[np.int32]
    """Indices into the plan's sources, by row of the plan."""
    digests: list[bytes]
    """16 bytes per row, in order, without padding rows."""
    columns: slice
    """The columns in [0, L) that this context rank holds."""

    @property
    def positions(self) -> torch.Tensor:
        """int32, shape as `tokens`: position in the document's fragment in this row."""
        import torch

        bounds = self.cu_seqlens.numpy()
        places = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds))
        return torch.from_numpy(places).view(len(self.tokens), -1)[:, self.columns]


class Batcher:
    """Makes micro-batches of `micro_batch` rows. A context rank gets contiguous columns of every
    row."""

    def __init__(
        self, micro_batch: int, *, context_rank: int = 0, context_size: int = 1, pin: bool = False
    ) -> None:
        import torch

        self.micro_batch = micro_batch
        self.context_rank, self.context_size = context_rank, context_size
        self._tensor: ToTensor = _pinned if pin else torch.from_numpy

    def make_batch(
        self,
        group: LoadedGroup,
        row_slice: slice,
        documents: Int64,
        boundaries: Int64,
    ) -> Batch:
        """Return rows from a group as a micro-batch, padded to `micro_batch` rows. `documents` and
        `boundaries` are the rows' part of the group's labels."""
        labels = group.labels
        rows, sources = labels.rows[row_slice], labels.sources[row_slice]
        tokens, weights = group.arrays.tokens[row_slice], group.arrays.weights[row_slice]
        length = group.step_group.phase.seq_len
        first_token = row_slice.start * length
        documents, boundaries = documents - first_token, boundaries - first_token
        model_length = int(labels.model_lengths[row_slice][0]) if len(rows) else length
        num_cuts = length // model_length
        num_padding = self.micro_batch - len(rows)
        if num_padding:
            first, end = len(rows) * num_cuts, self.micro_batch * num_cuts
            ends = np.arange(first + 1, end + 1) * model_length
            documents, boundaries = (
                np.concatenate([starts, ends]) for starts in (documents, boundaries)
            )
            rows, sources = (
                _append_padding(rows, num_padding, PADDING),
                _append_padding(sources, num_padding, 0),
            )
            tokens, weights = (
                _append_padding(tokens, num_padding, 0),
                _append_padding(weights, num_padding, 0),
            )
        if num_cuts > 1:
            tokens, weights = _cut_rows(tokens, model_length), weights.reshape(-1, model_length)
        columns = slice(
            self.context_rank * model_length // self.context_size,
            (self.context_rank + 1) * model_length // self.context_size,
        )
        return Batch(
            tokens=self._tensor(tokens[:, columns]),
            targets=self._tensor(tokens[:, columns.start + 1 : columns.stop + 1]),
            weights=self._tensor(weights[:, columns]),
            cu_seqlens=self._tensor(boundaries.astype(np.int32)),
            documents=documents,
            rows=rows,
            sources=sources,
            digests=labels.digests[row_slice],
            columns=columns,
        )


def _cut_rows(tokens: Int64, length: int) -> Int64:
    """Cut rows [n, L + 1] into shorter ones, each with the target after it."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1, axis=1)
    return windows[:, ::length].reshape(-1, length + 1)


def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(array)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _append_padding(values: npt.NDArray[Any], num_rows: int, padding: int) -> npt.NDArray[Any]:
    """Return the array with padding rows appended."""
    return np.concatenate([values, np.full((num_rows, *values.shape[1:]), padding, values.dtype)])
