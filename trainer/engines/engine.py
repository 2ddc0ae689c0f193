"""The interface between the loop and an engine.

An engine is built from an objective on the meta device. It allocates this rank's state without
values; the caller fills the state through `fragments()` before the first step.

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
    """Limit of the norm of all gradients; 0: no limit."""
    average: MovingAverage
    updates: int
    """Optimizer steps applied since the run began."""

    def __call__(self, *inputs: Any) -> Sums:
        """Run the objective's forward pass."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of one micro-batch; `last` is the last of an optimizer step."""

    def gradients(self) -> list[Fragment]:
        """Return the shards of the summed gradients that this rank applies: live memory. Parameters
        with copies are not yet summed over them. Call after the last backward pass."""

    def step(self, lr: float, finite: torch.Tensor) -> None:
        """Apply the gradients and clear them. Where `finite`, a bool on the device, is False, clear
        them and change nothing else."""

    def discard(self) -> None:
        """Clear the gradients and change nothing else."""

    def fragments(self) -> list[Fragment]:
        """Return this rank's masters and optimizer states: live memory, to save and to load."""

    def loaded(self, steps: int) -> None:
        """Update all that follows from the fragments, after they were written to."""


def give(engine: Engine, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill a new engine with weights. It reads whole tensors one after the other, and only those
    of which the rank holds a range: no rank holds more than one beside its shards."""
    fragments = engine.fragments()
    for fragment in masters(fragments):
        fragment.take(weights[fragment.parameter])
    begin_averages(fragments)
    engine.loaded(0)
