"""What the loop asks of an engine.

An engine is built of an objective on the meta device: it makes what this process holds, without
values, and is given them before anything else, through its fragments.

    for micro-batch:  sums = engine(…);  engine.backward(sums.total / weight, last=…)
    engine.update(lr)

Gradients of all micro-batches and ranks are *summed*: the loop has divided the loss by the
weight of the global batch already. An engine that averages undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..checkpoints.fragments import Fragment
from .objective import Objective, Sums


@dataclass(frozen=True)
class Update:
    """What became of one update."""

    grad_norm: float
    """Of the summed gradients, before clipping."""
    applied: bool
    """False where the norm was not finite: nothing was changed."""


class Engine(Protocol):
    objective: Objective
    updates: int
    """Updates applied since the run began."""

    def __call__(self, *inputs: Any) -> Sums:
        """The objective's forward pass."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch; the update follows the `last`."""

    def update(self, lr: float) -> Update:
        """Clip the gradients, apply them, and forget them."""

    def fragments(self) -> list[Fragment]:
        """This rank's part of masters and moments: views of live memory, for saving and loading."""

    def loaded(self, updates: int) -> None:
        """The fragments were written to: bring the rest of the state into line with them."""
