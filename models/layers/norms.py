"""Norms, computed in fp32 (fp64 stays fp64)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.options.names import Kernel, NormKind
from ..config.precision import widen
from ..kernels import gated_rms_norm, rms_norm
from ..kernels.choice import uses_kernel
from ..kernels.fp8 import Quantized
from ..parallel.axes import ALONE, Axis
from ..parallel.tensor import reduce, split_group_runs, sum_groups


class RMSNorm(nn.Module):
    """w · x / √(mean(x²) + eps); StripedHyena adds eps outside the root instead. Zero-centred, the
    weight is 1 + w, and weight decay draws it to 1."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        eps_outside: bool = False,
        zero_centered: bool = False,
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__()
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.eps_outside = eps_outside
        self.kernel: Kernel = kernel

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        with_input: bool = False,
        store: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Quantized | None]:
        """Return norm(x) [..., width]; with a residual, (total, norm(total)) for total = residual
        + x.

        `with_input` returns (x, norm(x)). Use that x in place of the argument: the norm's backward
        kernel then adds its gradient. `store` returns (x or total, norm, norm in FP8); the last is
        None if no kernel runs.
        """
        total, normed, quantized = self._compute(x, residual, store)
        if store:
            return total, normed, quantized
        return (total, normed) if with_input or residual is not None else normed

    def _compute(
        self, x: Tensor, residual: Tensor | None, store: bool
    ) -> tuple[Tensor, Tensor, Quantized | None]:
        if not self.fused(x):
            total = x if residual is None else residual + x
            return total, self.plain(total), None
        arguments = (self.gain, self.eps, self.eps_outside)
        if residual is None:
            total, normed, *stored = rms_norm.rms_norm_with_input(x, *arguments, store=store)
        elif store:
            total, normed, *stored = rms_norm.rms_norm_fp8(x, residual, *arguments)
        else:
            total, normed, *stored = rms_norm.add_rms_norm(residual, x, *arguments)
        return total, normed, Quantized(*stored) if stored else None

    @property
    def gain(self) -> Tensor:
        """What multiplies the normalised input."""
        return 1 + self.weight if self.zero_centered else self.weight

    def fused(self, x: Tensor) -> bool:
        """Return True if the kernel computes the norm of x, False if the twin does."""
        return uses_kernel(self.kernel, "rms_norm", x, rms_norm.unsupported_reason(x.shape[-1]))

    def plain(self, x: Tensor) -> Tensor:
        """The kernel's twin: the norm of x [..., width]."""
        wide = widen(x)
        return self.divide(wide, wide.square().mean(-1, keepdim=True), x.dtype)

    def divide(self, wide: Tensor, mean_square: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of x [..., channels], which its backward pass keeps once, widened, with a
        given mean square [..., 1]."""
        if self.eps_outside:
            normed = wide / (mean_square.sqrt() + self.eps)
        else:
            normed = wide * torch.rsqrt(mean_square + self.eps)
        return self.gain * normed.to(dtype)


class GatedRMSNorm(nn.Module):
    """Mamba-2's norm: RMSNorm(y · silu(z)), separately for `groups` contiguous groups."""

    def __init__(self, width: int, eps: float, *, groups: int = 1, kernel: Kernel = "auto") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.width = width
        self.groups = groups
        self.kernel: Kernel = kernel

    def forward(
        self, y: Tensor, z: Tensor, axis: Axis = ALONE, *, store: bool = False
    ) -> Tensor | tuple[Tensor, Quantized | None]:
        """Return the norm of this rank's channels, shaped like y and z [..., width / axis.size].

        `store` returns (norm, norm in FP8). The latter is None unless the kernel runs with one
        group on one rank: an FP8 scale needs a whole row, which a program holds only then.
        """
        problem = rms_norm.unsupported_reason(self.width // self.groups)
        fuses = uses_kernel(self.kernel, "gated_rms_norm", y, problem)
        if store and fuses and self.groups == axis.size == 1:
            normed, *stored = gated_rms_norm.gated_rms_norm_fp8(y, z, self.weight, self.eps)
            return normed, Quantized(*stored)
        if store:
            return self(y, z, axis), None
        if fuses:
            fused: Tensor = gated_rms_norm.gated_rms_norm(
                y, z, self.weight, self.eps, self.groups, axis.name
            )
            return fused
        return self.plain(y, z, axis)

    def plain(self, y: Tensor, z: Tensor, axis: Axis = ALONE) -> Tensor:
        """The kernel's twin: the norm of y and z [..., width / axis.size]."""
        gated = widen(y) * F.silu(widen(z))
        # A run is a rank's part of a group. Sums over runs become sums over groups of all ranks.
        num_runs = len(split_group_runs(self.groups, self.width, axis))
        runs = gated.unflatten(-1, (num_runs, -1))
        square_sums = sum_groups(runs.square().sum(-1), self.groups, self.width, axis)
        mean_square = square_sums.unsqueeze(-1) / (self.width // self.groups)
        normed: Tensor = runs * torch.rsqrt(mean_square + self.eps)
        return self.weight * normed.flatten(-2).to(y.dtype)


class LayerNorm(nn.Module):
    """(x − mean) / √(var + eps) · w + b, as in GPT-2."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return norm(x) [..., width]; with a residual, residual + x and norm(residual + x)."""
        total = x if residual is None else residual + x
        wide = F.layer_norm(widen(total), self.weight.shape, eps=self.eps)
        normed = self.weight * wide.to(x.dtype) + self.bias
        return normed if residual is None else (total, normed)

    def fused(self, x: Tensor) -> bool:
        """Return False: LayerNorm has no kernel."""
        return False


def norm_divided(
    norms: Sequence[RMSNorm], inputs: Sequence[Tensor], axis: Axis
) -> tuple[Tensor, ...]:
    """Apply norms to tensors [..., channels / axis.size] whose channels ranks share, by one message
    for all: the sums of their squares."""
    if axis.size == 1:
        return tuple(norm(x) for norm, x in zip(norms, inputs, strict=True))
    wides = [widen(x) for x in inputs]
    sums = [wide.square().sum(-1, keepdim=True) for wide in wides]
    widths = [x.shape[-1] * axis.size for x in inputs]
    means = [s / width for s, width in zip(reduce(torch.stack(sums), axis), widths, strict=True)]
    return tuple(
        norm.divide(wide, mean, x.dtype)
        for norm, wide, mean, x in zip(norms, wides, means, inputs, strict=True)
    )


Norm = RMSNorm | LayerNorm


def build_norm(kind: NormKind, width: int, eps: float, kernel: Kernel = "auto") -> Norm:
    if kind == "layer":
        return LayerNorm(width, eps)
    return RMSNorm(
        width,
        eps,
        eps_outside=kind == "rms-eps-outside",
        zero_centered=kind == "rms-zero-centered",
        kernel=kernel,
    )
