"""Muon: orthogonalised momentum for the matrices of projections, AdamW for all other parameters.

    m ← β·m + (1−β)·g                    momentum
    u = β·m + (1−β)·g, or m              Nesterov's, or plain
    o = U·V^T of u = U·S·V^T             by Newton–Schulz: all singular values near 1
    w ← (1 − η·λ)·w − η·0.2·√max(rows, columns)·o

Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon): the method and the coefficients of
the quintic iteration, which takes singular values into 0.7 … 1.2. Liu et al., 2025 (arXiv
2502.16982): weight decay, and the factor 0.2·√max(rows, columns), which scales the direction to the
root mean square of AdamW's, so that both share learning rate and weight decay.

Projections are orthogonalised separately: q, k and v in a weight are three matrices, and so are
gate and up, and those of each expert. Jordan found this better for q, k and v.

Ranks hold ranges of the matrix, but the iteration needs the whole: see exchange.py. A matrix is
computed once, on its owner, from the same bits in all layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....models.transforms.matrices import Matrices
from ...checkpoints.fragments import Fragment
from ...checkpoints.kinds import tensor_key
from .adamw_step import AdamW
from .exchange import Exchange
from .states import MOMENTUM, MUON, Arithmetic

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of X, X·X^T·X and (X·X^T)²·X: steep at 0; iterations bring singular values to about
0.7 to 1.2."""
RMS = 0.2
"""Typical root mean square of AdamW's directions."""
ARITHMETIC: dict[Arithmetic, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIN_NORM = 1e-7
"""Smaller norms are not scaled to 1: a matrix of zeros stays zero."""


class Muon(AdamW):
    """AdamW for some groups; the others descend along the directions from `direct`."""

    def __init__(
        self,
        *args: Any,
        matrices: Mapping[str, Matrices],
        momentum: float,
        nesterov: bool,
        iterations: int,
        arithmetic: Arithmetic,
        **kwargs: Any,
    ) -> None:
        """`matrices` are those to orthogonalise, by parameter."""
        super().__init__(*args, **kwargs)
        self.momentum, self.nesterov = momentum, nesterov
        self.iterations, self.arithmetic = iterations, ARITHMETIC[arithmetic]
        self.matrices = matrices
        self.device = self.param_groups[0]["params"][0].device
        self.exchange: Exchange | None = None

    @torch.no_grad()
    def direct(
        self, gradients: Sequence[Fragment], fragments: Callable[[], list[Fragment]], finite: Tensor
    ) -> None:
        states = {fragment.key: fragment.data for fragment in fragments()}
        muon_gradients = [g for g in gradients if g.parameter in self.matrices]
        beta = self.momentum
        for gradient in muon_gradients:
            momentum = states[tensor_key(MOMENTUM, gradient.parameter)]
            momentum.copy_(torch.where(finite, momentum.lerp(gradient.data, 1 - beta), momentum))
            if self.nesterov:
                gradient.data.lerp_(momentum, beta)
            else:
                gradient.data.copy_(momentum)
        if self.exchange is None:
            costs = {name: matrices.cost for name, matrices in self.matrices.items()}
            self.exchange = Exchange(muon_gradients, costs, self.device)
        self.exchange(muon_gradients, self._orthogonalize)
        for gradient in muon_gradients:
            gradient.data.masked_fill_(finite.logical_not(), 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            decay_factor: float | Tensor = 1 - group["lr"] * group["weight_decay"]
            if self.found_inf is not None:
                decay_factor = torch.where(self.found_inf == 0, decay_factor, 1.0).float()
            for tensor in group["params"] if group["states"] == MUON else ():
                if tensor.grad is not None:
                    tensor.mul_(decay_factor)
                    tensor.add_(tensor.grad, alpha=-group["lr"])
                    tensor.grad = None  # AdamW skips it
        return super().step(closure)

    def _orthogonalize(self, name: str, tensor: Tensor) -> Tensor:
        directions = [
            orthogonalize(matrix, self.iterations, self.arithmetic)
            * RMS
            * math.sqrt(max(matrix.shape[-2:]))
            for matrix in tensor.split(self.matrices[name].rows, dim=-2)
        ]
        return torch.cat(directions, dim=-2)


def orthogonalize(matrix: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix [..., rows, columns] with all singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = (matrix if wide else matrix.mT).to(dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=MIN_NORM)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x if wide else x.mT).to(matrix.dtype)
    return result
