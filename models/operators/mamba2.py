"""Mamba-2: a scalar-decay state space for each head, as matrix products (SSD).

z, x, B, C, dt = split(u·W)                 x, B, C ← silu(conv4(x, B, C))
S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t⊗B_t      Δ = softplus(dt + b), A = −exp(A_log)
y_t = S_t·C_t + D·x_t                       out = RMSNorm(y·silu(z))·W_out
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..initializers import Initializers
from ..kernels import ssd as kernel
from ..kernels.choice import chosen
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..layers.norms import GatedRMSNorm
from ..layers.scan import ssd
from ..parallel.sharding import Sharded, ShardingSpec
from ..parallel.tensor import own_groups
from ..precision import widen
from .base import BatchContext, FusedOptions, Operator, divides
from .short_conv import ShortConvolution


@dataclass(frozen=True, kw_only=True)
class Mamba2Options(FusedOptions):
    """Mamba-2 (SSD)."""

    kind: Literal["mamba2"] = "mamba2"
    state_size: int = 128
    """N: state elements for each channel."""
    head_dim: int = 64
    """P: channels that share a decay."""
    groups: int = 1
    """B and C are shared by heads/groups heads."""
    norm_groups: int | None = None
    """Groups of the gated norm, each normalised separately; equal to `groups` if unset."""
    expand: int = 2
    """Inner width divided by the model's width."""
    conv: int = 4
    """Taps of the short convolution."""
    chunk: int = 64
    """Tokens for each block of the scan; affects the speed, not the result."""
    norm_eps: float = 1e-5
    """Epsilon of the gated norm before the output."""
    bias: bool = False
    """Add biases in the input and output projections."""

    def problems(self, width: int) -> Iterator[str]:
        inner = self.expand * width
        yield from divides("head_dim", self.head_dim, "expand · width", inner)
        if self.head_dim > 0 and inner % self.head_dim == 0:
            yield from divides("groups", self.groups, "the heads", inner // self.head_dim)
        if self.norm_groups is not None:
            yield from divides("norm_groups", self.norm_groups, "expand · width", inner)
        for name in ("state_size", "conv", "chunk", "expand"):
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, not {getattr(self, name)}"
        if not self.norm_eps > 0:
            yield f"norm_eps must be above 0, not {self.norm_eps}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        heads = self.expand * width // self.head_dim
        return {"heads": heads, "channels of B": self.groups * self.state_size}


class Mamba2(Operator):
    Options = Mamba2Options
    full_precision = ("dt_bias", "A_log", "D")

    def __init__(self, options: Mamba2Options, width: int) -> None:
        super().__init__(options, width)
        inner = options.expand * width
        self.heads = heads = inner // options.head_dim
        shared = options.groups * options.state_size
        parts = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}
        self.input = SplitLinear(width, parts, bias=options.bias)
        self.conv = ShortConvolution(inner + 2 * shared, options.conv, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        norm_groups = options.norm_groups or options.groups
        self.norm = GatedRMSNorm(inner, options.norm_eps, groups=norm_groups, kernel=options.kernel)
        self.output = OutputLinear(inner, width, bias=options.bias)

    def forward(self, u: Tensor, batch: BatchContext) -> Tensor:
        z, x, B, C, dt = self.input(u)
        sizes = [x.shape[-1], B.shape[-1], C.shape[-1]]
        mixed = torch.cat([x, B, C], dim=-1)
        mixed = self.conv(mixed, batch, silu=True, kernel=self.options.kernel)
        x, B, C = mixed.split(sizes, dim=-1)
        x = x.unflatten(-1, (-1, self.options.head_dim))
        axis = batch.axes.tensor
        shared = (self.options.groups, self.heads, axis)
        B, C = own_groups(B, *shared), own_groups(C, *shared)
        dt = F.softplus(widen(dt) + widen(self.dt_bias))
        A = -torch.exp(widen(self.A_log))
        y = self.scan(x, dt, A, B, C, batch) + widen(self.D).unsqueeze(-1) * widen(x)
        result: Tensor = self.output(self.norm(y.flatten(2).to(u.dtype), z, axis))
        return result

    def scan(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, batch: BatchContext
    ) -> Tensor:
        axis = batch.axes.context
        beyond = kernel.beyond(x, B)
        if batch.state is None and chosen(self.options.kernel, "ssd", x, beyond):
            positions = batch.documents.positions if batch.documents is not None else None
            fused: Tensor = kernel.ssd(x, dt, A, B, C, None, positions, axis.name)[0]
            return fused
        tensors = batch.state.tensors if batch.state is not None else {}
        y, tensors["ssm"] = ssd(
            widen(x),
            dt,
            A,
            widen(B),
            widen(C),
            batch.documents,
            state=tensors.get("ssm"),
            axis=axis,
            chunk=self.options.chunk,
        )
        return y

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.input)
        self.conv.init_weights(init)
        init_dt_bias(self.dt_bias, init)
        init.uniform(self.A_log, 1, 16, torch.log)
        init.constant(self.D, 1.0)
        init.norm(self.norm)
        init.output(self.output)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard by heads. B and C are sharded evenly and gathered where heads need them."""
        parts = self.input.parts
        mixed = Sharded(0, (parts["x"], parts["B"], parts["C"]))
        return {
            **outputs("input", self.input),
            **dict.fromkeys(("conv.taps", "conv.bias"), mixed),
            **dict.fromkeys(("dt_bias", "A_log", "D", "norm.weight"), Sharded(0)),
            **inputs("output"),
        }

    def flops(self, length: int) -> dict[str, float]:
        """The blocked scan, for each token: C·B, mixing within the chunk, and the states twice."""
        chunk, size = min(self.options.chunk, length), self.options.state_size
        inner = self.heads * self.options.head_dim
        scores = 2.0 * chunk * size * self.options.groups
        return {
            "convolution": 2.0 * self.conv.taps.numel(),
            "scan": scores + 2.0 * chunk * inner + 4.0 * size * inner,
        }

    def step_flops(self, seen: int) -> dict[str, float]:
        """The recurrence: for each state element the decay, a product and a sum in, and out."""
        states = self.options.state_size * self.heads * self.options.head_dim
        return {"convolution": 2.0 * self.conv.taps.numel(), "scan": 5.0 * states}


def init_dt_bias(
    bias: Tensor, init: Initializers, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4
) -> None:
    """Initialise such that softplus(bias) is log-uniform in [low, high)."""

    def inverse_softplus(logs: Tensor) -> Tensor:
        dt = logs.exp().clamp(min=floor)
        return dt + torch.log(-torch.expm1(-dt))

    init.uniform(bias, math.log(low), math.log(high), inverse_softplus)
