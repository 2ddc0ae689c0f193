"""Settings for Muon (muon_step.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .adamw import adam_limits
from .config import OptimizerConfig
from .states import ADAM, MUON, Arithmetic

if TYPE_CHECKING:
    from torch import nn

    from ....models.model.model import Model
    from .base import Optimizer, ParameterGroup


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for operators' matrices, AdamW for everything else."""

    kind: Literal["muon"] = "muon"
    on_host = False
    momentum: float = 0.95
    """Fraction of the mean gradient that a step keeps."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    iterations: int = 5
    """Newton–Schulz iterations."""
    arithmetic: Arithmetic = "fp32"
    """Number format for the iterations. bf16, as published, is several times as fast on a GPU, and
    less exact."""
    beta1: float = 0.9
    """AdamW: fraction of the mean gradient that a step keeps."""
    beta2: float = 0.95
    """AdamW: fraction of the mean squared gradient that a step keeps."""
    eps: float = 1e-8
    """AdamW: added to the root of the mean square."""

    def limits(self) -> list[tuple[str, str, bool]]:
        return [
            *super().limits(),
            ("momentum", "in [0, 1)", 0 <= self.momentum < 1),
            ("iterations", "at least 1", self.iterations >= 1),
            *adam_limits(self.beta1, self.beta2, self.eps),
        ]

    def describe(self) -> str:
        return (
            f"Muon, peak {self.lr:g}, momentum {self.momentum:g}"
            f"{' (Nesterov)' if self.nesterov else ''}, decay {self.weight_decay:g}, clip "
            f"{self.clip:g}; AdamW, β {self.beta1:g} / {self.beta2:g}, for all but matrices"
            f"{self.describe_average()}"
        )

    def states(self, model: Model) -> dict[str, tuple[str, ...]]:
        from ....models.transforms.matrices import find_matrices

        muon_parameters = find_matrices(model.config)
        return {
            name: MUON if name in muon_parameters else ADAM for name, _ in model.named_parameters()
        }

    def build(
        self, model: Model, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer:
        from ....models.transforms.matrices import find_matrices
        from .base import torch_groups
        from .muon_step import Muon

        return Muon(
            torch_groups(groups, parameters),
            matrices=find_matrices(model.config),
            momentum=self.momentum,
            nesterov=self.nesterov,
            iterations=self.iterations,
            arithmetic=self.arithmetic,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=True,
        )
