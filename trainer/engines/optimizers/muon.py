"""Muon: momentum, orthogonalised; AdamW for all that is not a matrix of a projection.

    m ← β·m + (1−β)·g                    momentum
    u = β·m + (1−β)·g, or m              Nesterov's, or plain
    o = U·V^T of u = U·S·V^T             by Newton–Schulz: all singular values near 1
    w ← (1 − η·λ)·w − η·0.2·√max(rows, columns)·o

Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon): the method and the coefficients of
the quintic iteration, which takes singular values into 0.7 … 1.2. Liu et al., 2025 (arXiv
2502.16982): weight decay, and the factor 0.2·√max(rows, columns), which gives the direction the
root mean square of AdamW's, so that both have one learning rate and one weight decay.

Each projection is orthogonalised by itself: q, k and v of one weight are three matrices, and so
are gate and up, and those of every expert. Jordan found this better for q, k and v.

The whole matrix is needed, of which ranks hold ranges: see exchange.py. It is computed once, on
one rank, from the same bits in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ....models.matrices import Matrices, matrices
from ....models.model import Model
from ...checkpoints.fragments import Fragment, keyed
from .adamw import STATES as ADAM_STATES
from .adamw import AdamW, adam_limits
from .base import Optimizer, OptimizerConfig, ParameterGroup, torch_groups
from .exchange import Exchange

MOMENTUM = "momentum"
STATES = (MOMENTUM,)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X·X^T·X and (X·X^T)²·X: steep at 0; iterations bring singular values to about
0.7 to 1.2."""
RMS = 0.2
"""Root mean square of AdamW's usual directions."""
ARITHMETIC = {"fp32": torch.float32, "bf16": torch.bfloat16}
TINY = 1e-7
"""Least norm that is scaled to one: a matrix of zeros stays one of zeros."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices of operators, AdamW for everything else."""

    kind: Literal["muon"] = "muon"
    on_host = False
    momentum: float = 0.95
    """Share of the mean gradient that a step keeps."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    iterations: int = 5
    """Newton–Schulz iterations."""
    arithmetic: Literal["fp32", "bf16"] = "fp32"
    """Number format of the iterations. bf16, as published, is several times as fast on a GPU, and
    less exact."""
    beta1: float = 0.9
    """AdamW: share of the mean gradient that a step keeps."""
    beta2: float = 0.95
    """AdamW: share of the mean squared gradient that a step keeps."""
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
        found = matrices(model.config)
        return {
            name: STATES if name in found else ADAM_STATES for name, _ in model.named_parameters()
        }

    def build(
        self, model: Model, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
    ) -> Optimizer:
        return Muon(
            self,
            matrices(model.config),
            torch_groups(groups, parameters),
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=True,
        )


class Muon(AdamW):
    """AdamW for some groups; the others descend along directions that `direct` has found."""

    def __init__(
        self, config: MuonConfig, found: Mapping[str, Matrices], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.config = config
        self.matrices = found
        self.device = self.param_groups[0]["params"][0].device
        self.exchange: Exchange | None = None

    @torch.no_grad()
    def direct(
        self, gradients: Sequence[Fragment], held: Callable[[], list[Fragment]], finite: Tensor
    ) -> None:
        states = {each.key: each.data for each in held()}
        ours = [each for each in gradients if each.parameter in self.matrices]
        beta = self.config.momentum
        for each in ours:
            momentum = states[keyed(MOMENTUM, each.parameter)]
            momentum.copy_(torch.where(finite, momentum.lerp(each.data, 1 - beta), momentum))
            if self.config.nesterov:
                each.data.lerp_(momentum, beta)
            else:
                each.data.copy_(momentum)
        if self.exchange is None:
            costs = {name: found.cost for name, found in self.matrices.items()}
            self.exchange = Exchange(ours, costs, self.device)
        self.exchange(ours, self._orthogonal)
        for each in ours:
            each.data.masked_fill_(finite.logical_not(), 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            kept: float | Tensor = 1 - group["lr"] * group["weight_decay"]
            if self.found_inf is not None:
                kept = torch.where(self.found_inf == 0, kept, 1.0).float()
            for tensor in group["params"] if group["states"] == STATES else ():
                if tensor.grad is not None:
                    tensor.mul_(kept)
                    tensor.add_(tensor.grad, alpha=-group["lr"])
                    tensor.grad = None  # AdamW passes over it
        return super().step(closure)

    def _orthogonal(self, name: str, whole: Tensor) -> Tensor:
        dtype = ARITHMETIC[self.config.arithmetic]
        parts = [
            orthogonal(part, self.config.iterations, dtype) * RMS * math.sqrt(max(part.shape[-2:]))
            for part in whole.split(self.matrices[name].rows, dim=-2)
        ]
        return torch.cat(parts, dim=-2)


def orthogonal(matrix: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix [..., rows, columns] with all its singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = (matrix if wide else matrix.mT).to(dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=TINY)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x if wide else x.mT).to(matrix.dtype)
    return result
