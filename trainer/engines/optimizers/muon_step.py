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
from typing import Any

import torch
from torch import Tensor

from ....models.transforms.matrices import Matrices
from ...checkpoints.fragments import Fragment
from ...checkpoints.kinds import keyed
from .adamw_step import AdamW
from .exchange import Exchange
from .states import MOMENTUM, MUON, Arithmetic

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X·X^T·X and (X·X^T)²·X: steep at 0; iterations bring singular values to about
0.7 to 1.2."""
RMS = 0.2
"""Root mean square of AdamW's usual directions."""
ARITHMETIC: dict[Arithmetic, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
TINY = 1e-7
"""Least norm that is scaled to one: a matrix of zeros stays one of zeros."""


class Muon(AdamW):
    """AdamW for some groups; the others descend along directions that `direct` has found."""

    def __init__(
        self,
        *args: Any,
        found: Mapping[str, Matrices],
        momentum: float,
        nesterov: bool,
        iterations: int,
        arithmetic: Arithmetic,
        **kwargs: Any,
    ) -> None:
        """`found` are the parameters that hold matrices."""
        super().__init__(*args, **kwargs)
        self.momentum, self.nesterov = momentum, nesterov
        self.iterations, self.arithmetic = iterations, ARITHMETIC[arithmetic]
        self.matrices = found
        self.device = self.param_groups[0]["params"][0].device
        self.exchange: Exchange | None = None

    @torch.no_grad()
    def direct(
        self, gradients: Sequence[Fragment], held: Callable[[], list[Fragment]], finite: Tensor
    ) -> None:
        states = {each.key: each.data for each in held()}
        ours = [each for each in gradients if each.parameter in self.matrices]
        beta = self.momentum
        for each in ours:
            momentum = states[keyed(MOMENTUM, each.parameter)]
            momentum.copy_(torch.where(finite, momentum.lerp(each.data, 1 - beta), momentum))
            if self.nesterov:
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
            for tensor in group["params"] if group["states"] == MUON else ():
                if tensor.grad is not None:
                    tensor.mul_(kept)
                    tensor.add_(tensor.grad, alpha=-group["lr"])
                    tensor.grad = None  # AdamW passes over it
        return super().step(closure)

    def _orthogonal(self, name: str, whole: Tensor) -> Tensor:
        parts = [
            orthogonal(part, self.iterations, self.arithmetic)
            * RMS
            * math.sqrt(max(part.shape[-2:]))
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
