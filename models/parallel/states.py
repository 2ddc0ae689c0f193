"""States that pass from part to part of a row: S ← kept · S + added, for each part.

A part works out what it adds to a state and how much it keeps of the one that comes in; these
summaries go to every later rank, and each folds those of the ranks before it. What crosses does
not grow with the row: (N−1)/2 summaries for each process on average, none of them waiting for
another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import exchange


def entering(added: Tensor, kept: Tensor, axis: Axis) -> Tensor:
    """The state that comes into our part. `kept` is broadcast over `added`."""
    summary = torch.cat([added.flatten(), kept.flatten()]).unsqueeze(0)
    others = range(axis.size)
    received = exchange(
        [summary if reader > axis.rank else summary[:0] for reader in others],
        [(int(owner < axis.rank), summary.shape[1]) for owner in others],
        axis,
    )
    # The first part is entered by zeros; they stand in front, so that rank 0 has a part in this.
    summaries = torch.cat([torch.zeros_like(summary), *received])
    state = torch.zeros_like(added)
    for each in summaries:
        adds, keeps = each.split([added.numel(), kept.numel()])
        state = state * keeps.view_as(kept) + adds.view_as(added)
    return state
