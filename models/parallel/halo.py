"""The halo: what a causal filter of K taps sees of the parts of a row before ours.

    rank 0   a b c d                 sends  c d
    rank 1       c d │ e f g h       sends  g h
    rank 2               g h │ …

K−1 places cross each cut, however long the row is. A filter that reaches over more than one part
gets its halo from as many ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import exchange


def preceding(x: Tensor, count: int, axis: Axis, *, part: int) -> Tensor:
    """The `count` places before our part of the rows; zeros where there are none.

    Parts have `part` places; x [rows, …] holds the last of ours, `count` or all.
    """
    rows, here, *width = x.shape

    def owed(distance: int) -> int:
        """How many places a rank wants of the one that stands so far before it."""
        return min(max(count - (distance - 1) * part, 0), part) if distance > 0 else 0

    others = range(axis.size)
    received = exchange(
        [x[:, here - owed(reader - axis.rank) :] for reader in others],
        [(rows, owed(axis.rank - owner), *width) for owner in others],
        axis,
    )
    missing = count - sum(piece.shape[1] for piece in received)
    return torch.cat([x.new_zeros(rows, missing, *width), *received], dim=1)
