"""Halo exchange: the inputs before a rank's slice of a row that a causal filter with K taps reads.

    rank 0   a b c d                 sends  c d
    rank 1       c d │ e f g h       sends  g h
    rank 2               g h │ …

K−1 positions cross each boundary, for any row length. A filter longer than a slice receives its
halo from several ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import exchange


def receive_halo(x: Tensor, count: int, axis: Axis, *, local_length: int) -> Tensor:
    """Return the `count` positions before this rank's slice of the rows, zero before the row
    starts.

    A slice has `local_length` positions. x [rows, positions, …] has at least its last `count`, or
    all.
    """
    rows, length, *width = x.shape

    def count_needed(distance: int) -> int:
        """Count the positions that a rank needs from the rank `distance` before it."""
        return (
            min(max(count - (distance - 1) * local_length, 0), local_length) if distance > 0 else 0
        )

    ranks = range(axis.size)
    num_sent = [count_needed(reader - axis.rank) for reader in ranks]
    max_sent = max(num_sent)
    tail = x[:, length - max_sent :]  # the one slice whose gradient is as large as x
    empty = tail[:, :0]
    received = exchange(
        [tail[:, max_sent - needed :] if needed else empty for needed in num_sent],
        [(rows, count_needed(axis.rank - owner), *width) for owner in ranks],
        axis,
    )
    missing = count - sum(piece.shape[1] for piece in received)
    return torch.cat([x.new_zeros(rows, missing, *width), *received], dim=1)
