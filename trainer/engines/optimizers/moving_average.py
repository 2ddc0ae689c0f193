"""Update the moving average of the weights.

    average ← d·average + (1−d)·weights,   d = min(decay, (1 + n) / (10 + n)) in step n

The first steps have a lower d, so that the random initial weights are forgotten soon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...checkpoints.fragments import Fragment, pair_averages


class MovingAverage:
    def __init__(self, decay: float | None, device: torch.device) -> None:
        """`decay` None: there is no average."""
        self.decay = decay
        self.steps = torch.zeros((), dtype=torch.float64, device=device)
        """Optimizer steps applied since the run began; on the device, because the host launches the
        next step before it knows whether this one was applied."""

    def loaded(self, steps: int) -> None:
        self.steps.fill_(steps)

    def move(self, fragments: Callable[[], Sequence[Fragment]], finite: Tensor) -> None:
        """Update the averages in `fragments()` after an optimizer step; change nothing if `finite`,
        a bool on the device, is False."""
        if self.decay is None:
            return
        pairs = pair_averages(fragments())
        self.steps += finite
        decay = ((1 + self.steps) / (10 + self.steps)).clamp(max=self.decay)
        weight_of_new = torch.where(finite, 1 - decay, 0.0)
        for average, weight in pairs:
            data = average.data
            data.lerp_(weight.data, weight_of_new.to(data.device, data.dtype))
