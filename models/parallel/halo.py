"""The halo: the inputs before a part of a row that a causal filter of K taps reads.

    rank 0   a b c d                 sends  c d
    rank 1       c d │ e f g h       sends  g h
    rank 2               g h │ …

K−1 positions cross each boundary, whatever the row's length. A filter that reaches over several
parts gets its halo from several ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import exchange


def preceding(x: Tensor, count: int, axis: Axis, *, part: int) -> Tensor:
    """Return the `count` positions before this rank's part of the rows; zeros before the row.

    A part has `part` positions; x [rows, …] holds this rank's last `count` of them, or all.
    """
    rows, here, *width = x.shape

    def owed(distance: int) -> int:
        """Number of positions that a rank needs from the rank `distance` before it."""
        return min(max(count - (distance - 1) * part, 0), part) if distance > 0 else 0

    ranks = range(axis.size)
    owes = [owed(reader - axis.rank) for reader in ranks]
    most = max(owes)
    end = x[:, here - most :]  # the one slice whose gradient is as large as x
    nothing = end[:, :0]
    received = exchange(
        [end[:, most - number :] if number else nothing for number in owes],
        [(rows, owed(axis.rank - owner), *width) for owner in ranks],
        axis,
    )
    missing = count - sum(piece.shape[1] for piece in received)
    return torch.cat([x.new_zeros(rows, missing, *width), *received], dim=1)
