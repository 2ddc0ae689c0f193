"""AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Optimizer
from .states import ADAM

STEP = "step"


class AdamW(Optimizer, torch.optim.AdamW):
    """torch's AdamW, whose state exists before the first step."""

    found_inf: Tensor | None = None
    """1 on the device if the step must change nothing, else 0; the fused kernel reads it."""

    def state_tensors(self, tensor: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        if names == ADAM and not self.state[tensor]:
            # As torch creates it at the first step.
            step = torch.zeros((), dtype=torch.float32, device=tensor.device)
            self.state[tensor][STEP] = step
        return super().state_tensors(tensor, names)

    def step_if(self, finite: Tensor) -> None:
        self.found_inf = finite.logical_not().float()
        self.step()

    def loaded(self, steps: int) -> None:
        """Set the number of steps in the moments, on which the bias correction depends."""
        for state in self.state.values():
            if STEP in state:
                state[STEP].fill_(steps)
