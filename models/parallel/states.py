"""States that pass from part to part of a row: S ← kept · S + added, for each part.

A part works out what it adds to a state and how much it keeps of the one that comes in; these
summaries go to every later rank, and each folds those of the ranks before it. What crosses does
not grow with the row: (N−1)/2 summaries for each process on average, none of them waiting for
another. The gradients of states pass in the same way, backward: a kernel that has them in hand
says so, and plain torch comes to it by differentiation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import exchange


def entering(added: Tensor, kept: Tensor, axis: Axis, *, backward: bool = False) -> Tensor:
    """The state that comes into our part; backward, from the parts behind it. `kept` is broadcast
    over `added`."""
    summary = torch.cat([added.flatten(), kept.flatten()]).unsqueeze(0)

    def feeds(owner: int, reader: int) -> bool:
        return owner > reader if backward else owner < reader

    others = range(axis.size)
    received = exchange(
        [summary if feeds(axis.rank, reader) else summary[:0] for reader in others],
        [(int(feeds(owner, axis.rank)), summary.shape[1]) for owner in others],
        axis,
    )
    if backward:
        received.reverse()
    # The first part is entered by zeros; they stand in front, so that it has a part in this.
    summaries = torch.cat([torch.zeros_like(summary), *received])
    state = torch.zeros_like(added)
    for each in summaries:
        adds, keeps = each.split([added.numel(), kept.numel()])
        state = state * keeps.view_as(kept) + adds.view_as(added)
    return state
