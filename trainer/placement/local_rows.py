"""A rank's part of rows that context- and tensor-parallel ranks share.

row     a c g t a c g t ·        padded to a multiple of the ranks: a causal model does not
rank 0  a c g t a                see what follows
rank 1            c g t · ·
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...models.model.model import Model
from ...models.parallel.collectives import all_reduce

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class LocalRows:
    """This rank's part of some rows."""

    ids: Tensor
    """int64 [rows, context_length], zero in the padding; equal on tensor-parallel ranks."""
    first: int
    """Position in the rows of the first token in `ids`."""
    states: slice
    """Tokens in `ids` whose states this rank holds: all, or a slice under tensor parallelism."""

    @classmethod
    def cut(cls, model: Model, rows: Sequence[Sequence[int] | Ids]) -> LocalRows:
        context, tensor = model.axes.context, model.axes.tensor
        length = max(map(len, rows))
        padded = np.zeros((len(rows), length + -length % (context.size * tensor.size)), np.int64)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = row
        part = context.part_range(padded.shape[1])
        local = torch.from_numpy(padded[:, part.start : part.stop].copy())
        ids = local.to(model.embedding.weight.device)
        return cls(ids, part.start, tensor.part(len(part)))

    @property
    def first_state(self) -> int:
        """Position in the rows of the first token whose state this rank holds."""
        return self.first + int(self.states.start)

    def mask(self, lengths: Sequence[int]) -> Tensor:
        """Return float32 [rows, context_length]: 1 for the tokens of a row, 0 for its padding."""
        device = self.ids.device
        positions = torch.arange(self.first, self.first + self.ids.shape[1], device=device)
        return (positions < torch.tensor(lengths, device=device)[:, None]).float()


def sum_over_ranks(model: Model, x: Tensor) -> Tensor:
    for axis in (model.axes.context, model.axes.tensor):
        x = x if axis.size == 1 else all_reduce(x, axis)
    return x


def shares_rows(model: Model) -> bool:
    """Return True if further ranks have parts of this rank's rows."""
    return model.axes.context.size > 1 or model.axes.tensor.size > 1
