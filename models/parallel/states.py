"""State passing from part to part of a row: S ← kept · S + added, for each part.

Each part computes what it adds to the state and how much it keeps of the incoming one. These
summaries go to every later rank, and each rank folds those of the ranks before it. The payload
does not grow with the row: (N−1)/2 summaries for each rank on average, sent at the same time.
Gradients of states pass in the same way, backward: kernels call `entering(…, backward=True)`,
plain torch gets there by differentiation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import exchange


def entering(added: Tensor, kept: Tensor, axis: Axis, *, backward: bool = False) -> Tensor:
    """Return the state that enters this rank's part; if `backward`, the one from the parts behind.
    `kept` is broadcast over `added`."""
    summary = torch.cat([added.flatten(), kept.flatten()]).unsqueeze(0)

    def feeds(owner: int, reader: int) -> bool:
        return owner > reader if backward else owner < reader

    ranks = range(axis.size)
    received = exchange(
        [summary if feeds(axis.rank, reader) else summary[:0] for reader in ranks],
        [(int(feeds(owner, axis.rank)), summary.shape[1]) for owner in ranks],
        axis,
    )
    if backward:
        received.reverse()
    # Zeros enter the first part. They come first, so that its result depends on the exchange too.
    summaries = torch.cat([torch.zeros_like(summary), *received])
    state = torch.zeros_like(added)
    for received_summary in summaries:
        adds, keeps = received_summary.split([added.numel(), kept.numel()])
        state = state * keeps.view_as(kept) + adds.view_as(added)
    return state
