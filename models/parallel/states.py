"""State passing between a row's slices: S ← decay · S + added, rank by rank.

Each rank computes its contribution to the state and the incoming state's decay, or its transition
matrix. These summaries go to every later rank, and each rank folds the earlier ranks' summaries.
The payload does not depend on the row length: on average (N−1)/2 summaries per rank, sent at the
same time. State gradients pass backward in the same way: kernels call
`receive_state(…, backward=True)`, plain torch differentiates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .axes import Axis
from .exchange import exchange


def receive_state(
    added: Tensor,
    decay: Tensor,
    axis: Axis,
    *,
    backward: bool = False,
    apply: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> Tensor:
    """Return the state that enters this rank's part from earlier parts; if `backward`, from later
    parts. A part maps a state to `apply(decay, state) + added`; `apply` is a product or, with
    transition matrices as `decay`, a matrix product."""
    summary = torch.cat([added.flatten(), decay.flatten()]).unsqueeze(0)

    def sends(sender: int, receiver: int) -> bool:
        return sender > receiver if backward else sender < receiver

    ranks = range(axis.size)
    received = exchange(
        [summary if sends(axis.rank, receiver) else summary[:0] for receiver in ranks],
        [(int(sends(sender, axis.rank)), summary.shape[1]) for sender in ranks],
        axis,
    )
    if backward:
        received.reverse()
    # Zeros enter the first part. They come first, so that its result depends on the exchange too.
    summaries = torch.cat([torch.zeros_like(summary), *received])
    state = torch.zeros_like(added)
    for received_summary in summaries:
        contribution, new_decay = received_summary.split([added.numel(), decay.numel()])
        state = apply(new_decay.view_as(decay), state) + contribution.view_as(added)
    return state
