"""The interface between the loop and an engine.

An engine is built from an objective on the meta device. It allocates this rank's state but does not
initialize it; the caller fills it through `fragments()` before the first step.

    for micro-batch:  sums = engine(…);  engine.backward(sums.total / weight, last=…)
    update(engine, lr)                   # update.py, the same for all engines

Gradients of all micro-batches and ranks are *summed*: the loop has divided the loss by the
weight of the global batch. An engine that averages gradients multiplies by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..checkpoints.fragments import Fragment, begin_averages, masters
from .objective import Objective, Sums
from .optimizers.base import Optimizer
from .optimizers.moving_average import MovingAverage


class Engine(Protocol):
    objective: Objective
    optimizer: Optimizer
    device: torch.device
    dtype: torch.dtype
    """Number format of the residual stream."""
    clip: float
    """Maximum norm of all gradients; 0: no limit."""
    average: MovingAverage
    updates: int
    """Optimizer steps applied since the run began."""

    def __call__(self, *inputs: Any) -> Sums:
        """Run the objective's forward pass."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate a micro-batch's gradients; `last` marks the last one before an optimizer
        step."""

    def gradients(self) -> list[Fragment]:
        """Return the shards of the summed gradients that this rank applies: live memory. Gradients
        of copied parameters are not yet summed over the copies. Call after the last backward
        pass."""

    def step(self, lr: float, finite: torch.Tensor) -> None:
        """Apply and clear the gradients. If `finite`, a bool on the device, is False, only clear
        them."""

    def discard(self) -> None:
        """Clear the gradients without a step."""

    def fragments(self) -> list[Fragment]:
        """Return this rank's masters and optimizer states: live memory, to save or to overwrite."""

    def loaded(self, steps: int) -> None:
        """Recompute what derives from the fragments, after they were overwritten."""


def load_weights(engine: Engine, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill a new engine with weights.

    A rank reads the unsharded tensors of its shards one by one, and holds a single one at a time.
    """
    fragments = engine.fragments()
    for fragment in masters(fragments):
        fragment.take(weights[fragment.parameter])
    begin_averages(fragments)
    engine.loaded(0)
