"""The moving average of the weights, which an engine keeps beside its masters.

A step keeps the part `decay` of the average. The first steps keep less, (1 + n) / (10 + n) in step
n, so that the initial weights, which are random, are forgotten soon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...checkpoints.fragments import Fragment, averaged


class MovingAverage:
    def __init__(self, decay: float | None, device: torch.device) -> None:
        """Without a decay, there is no average."""
        self.decay = decay
        self.steps = torch.zeros((), dtype=torch.float64, device=device)
        """Optimizer steps applied since the run began; on the device, because the host launches a
        step before it knows whether the last one was applied."""

    def loaded(self, steps: int) -> None:
        self.steps.fill_(steps)

    def move(self, held: Callable[[], Sequence[Fragment]], finite: Tensor) -> None:
        """Move the averages of the held fragments, after an optimizer step; where
        `finite` is False, change nothing."""
        if self.decay is None:
            return
        fragments = held()
        self.steps += finite
        kept = ((1 + self.steps) / (10 + self.steps)).clamp(max=self.decay)
        moved = torch.where(finite, 1 - kept, 0.0)
        for average, weight in averaged(fragments):
            data = average.data
            data.lerp_(weight.data, moved.to(data.device, data.dtype))
