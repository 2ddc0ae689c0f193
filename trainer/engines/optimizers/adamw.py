"""Settings for AdamW (Loshchilov & Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .config import OptimizerConfig
from .states import ADAM

if TYPE_CHECKING:
    from torch import nn

    from ....models.model.model import Model
    from .base import Optimizer, ParameterGroup


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW. The mixture's phases scale its learning rate."""

    kind: Literal["adamw"] = "adamw"
    beta1: float = 0.9
    """Fraction of the mean gradient that a step keeps."""
    beta2: float = 0.95
    """Fraction of the mean squared gradient that a step keeps."""
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
        return {name: ADAM for name, _ in model.named_parameters()}

    def build(
        self, model: Model, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer:
        from .adamw_step import AdamW
        from .base import torch_groups

        betas = (self.beta1, self.beta2)
        return AdamW(
            torch_groups(groups, parameters), lr=self.lr, betas=betas, eps=self.eps, fused=True
        )


def adam_limits(beta1: float, beta2: float, eps: float) -> list[tuple[str, str, bool]]:
    return [
        ("beta1", "in [0, 1)", 0 <= beta1 < 1),
        ("beta2", "in [0, 1)", 0 <= beta2 < 1),
        ("eps", "above 0", eps > 0),
    ]
