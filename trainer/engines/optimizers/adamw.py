"""AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ....models.model import Model
from .base import Optimizer, OptimizerConfig, ParameterGroup, torch_groups

STATES = ("exp_avg", "exp_avg_sq")
STEP = "step"


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW. The mixture's phases scale its learning rate."""

    kind: Literal["adamw"] = "adamw"
    beta1: float = 0.9
    """Share of the mean gradient that a step keeps."""
    beta2: float = 0.95
    """Share of the mean squared gradient that a step keeps."""
    eps: float = 1e-8
    """Added to the root of the mean square."""

    def limits(self) -> list[tuple[str, str, bool]]:
        return [*super().limits(), *adam_limits(self.beta1, self.beta2, self.eps)]

    def describe(self) -> str:
        return (
            f"AdamW, peak {self.lr:g}, β {self.beta1:g} / {self.beta2:g}, decay "
            f"{self.weight_decay:g}, clip {self.clip:g}{self.describe_average()}"
        )

    def states(self, model: Model) -> dict[str, tuple[str, ...]]:
        return {name: STATES for name, _ in model.named_parameters()}

    def build(
        self, model: Model, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer:
        betas = (self.beta1, self.beta2)
        return AdamW(
            torch_groups(groups, parameters), lr=self.lr, betas=betas, eps=self.eps, fused=True
        )


class AdamW(Optimizer, torch.optim.AdamW):
    """torch's AdamW, whose state exists before the first step."""

    found_inf: Tensor | None = None
    """1 on the device if the step must change nothing, else 0: the fused kernel reads it."""

    def state_of(self, tensor: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        if names == STATES and not self.state[tensor]:
            # As torch creates it at the first step.
            step = torch.zeros((), dtype=torch.float32, device=tensor.device)
            self.state[tensor][STEP] = step
        return super().state_of(tensor, names)

    def step_if(self, finite: Tensor) -> None:
        self.found_inf = finite.logical_not().float()
        self.step()

    def loaded(self, steps: int) -> None:
        """Set the number of steps that the moments have seen: the bias correction depends on it."""
        for state in self.state.values():
            if STEP in state:
                state[STEP].fill_(steps)


def adam_limits(beta1: float, beta2: float, eps: float) -> list[tuple[str, str, bool]]:
    return [
        ("beta1", "in [0, 1)", 0 <= beta1 < 1),
        ("beta2", "in [0, 1)", 0 <= beta2 < 1),
        ("eps", "above 0", eps > 0),
    ]
