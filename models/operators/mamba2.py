"""Mamba-2: a scalar-decay state space for each head, as matrix products (SSD).

z, x, B, C, dt = split(u·W)                 x, B, C ← silu(conv4(x, B, C))
S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t⊗B_t      Δ = softplus(dt + b), A = −exp(A_log)
y_t = S_t·C_t + D·x_t                       out = RMSNorm(y·silu(z))·W_out

Falcon-H1 has no norm, and multiplies z, x, B, C and dt by constants.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.options.mamba2 import Mamba2Options
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..layers.mixed_scan import mixed_scan
from ..layers.norms import GatedRMSNorm
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import select_local_groups
from .base import BatchContext, Operator
from .short_conv import ShortConvolution


class Mamba2(Operator):
    Options = Mamba2Options
    full_precision = ("dt_bias", "A_log", "D")

    def __init__(self, options: Mamba2Options, width: int) -> None:
        super().__init__(options, width)
        inner = options.inner(width)  # h·p
        self.heads = heads = options.num_heads(width)
        BC_width = options.groups * options.state_size  # g·n
        widths = {"z": inner, "x": inner, "B": BC_width, "C": BC_width, "dt": heads}
        # B, C and dt select states: they stay out of FP8.
        self.input = SplitLinear(width, widths, bias=options.bias, wide=("B", "C", "dt"))
        self.conv = ShortConvolution(inner + 2 * BC_width, options.conv, bias=True)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        norm_groups = options.norm_groups or options.groups
        norm = GatedRMSNorm(inner, options.norm_eps, groups=norm_groups, kernel=options.kernel)
        self.norm = norm if options.gated_norm else None
        self.output = OutputLinear(inner, width, bias=options.bias)

    def forward(self, u: Tensor, batch: BatchContext) -> Tensor:
        """Map u [b, t, width] to the same shape. This rank holds h heads with p channels, and g
        groups with n state elements."""
        options, tp = self.options, batch.axes.tensor
        z_width, *xBC_widths, dt_width = self.input.parts.values()
        # z [b, t, h·p]   xBC [b, t, h·p + 2·g·n]   dt [b, t, h]
        z, xBC, dt = self.input(u, batch.stored, sizes=[z_width, sum(xBC_widths), dt_width])
        if options.projection_multipliers is not None:
            z_factor, *xBC_factors, dt_factor = options.projection_multipliers
            parts = zip(xBC.split(xBC_widths, dim=-1), xBC_factors, strict=True)
            z, dt = z * z_factor, dt * dt_factor
            xBC = torch.cat([part * factor for part, factor in parts], dim=-1)
        xBC = self.conv(xBC, batch, silu=True, kernel=options.kernel)
        if options.groups % tp.size:  # the heads of a rank share groups with those of others
            x, *BC = xBC.split(xBC_widths, dim=-1)
            local_BC = (
                select_local_groups(t, options.groups, self.heads, tp).flatten(-2) for t in BC
            )
            xBC = torch.cat([x, *local_BC], dim=-1)
        # In generation, the state S [b, h, p, n] goes on from the last call; else it is dropped.
        cache = batch.state.tensors if batch.state is not None else {}
        # y [b, t, h·p]
        y, cache["ssm"] = mixed_scan(
            xBC,
            dt,
            self.dt_bias,
            self.A_log,
            self.D,
            batch.documents,
            head_dim=options.head_dim,
            state_size=options.state_size,
            state=cache.get("ssm"),
            axis=batch.axes.context,
            chunk=options.chunk,
            kernel="torch" if batch.state is not None else options.kernel,
        )
        if self.norm is None:
            normed, stored = y * F.silu(z), None
        elif self.output.takes_stored:  # the norm's kernel writes its output in FP8, too
            normed, stored = self.norm(y, z, tp, store=True)
        else:
            normed, stored = self.norm(y, z, tp), None
        out: Tensor = self.output(normed, stored)
        return out

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.input)
        self.conv.init_weights(init)
        init_dt_bias(self.dt_bias, init)
        init.uniform(self.A_log, 1, 16, torch.log)
        init.constant(self.D, 1.0)
        if self.norm is not None:
            init.norm(self.norm)
        init.output(self.output)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard by heads. B and C are sharded evenly and gathered where heads need them."""
        widths = self.input.parts
        xBC = Sharded(0, (widths["x"], widths["B"], widths["C"]))
        return {
            **outputs("input", self.input),
            **dict.fromkeys(("conv.taps", "conv.bias"), xBC),
            **dict.fromkeys(("dt_bias", "A_log", "D"), Sharded(0)),
            **({} if self.norm is None else {"norm.weight": Sharded(0)}),
            **inputs("output"),
        }

    def flops(self, length: int) -> dict[str, float]:
        """Count the chunked scan's FLOPs per token: C·B, scores · x within a chunk, and the states
        in and out."""
        chunk, state_size = min(self.options.chunk, length), self.options.state_size
        inner = self.heads * self.options.head_dim
        scores = 2.0 * chunk * state_size * self.options.groups
        return {
            "convolution": 2.0 * self.conv.taps.numel(),
            "scan": scores + 2.0 * chunk * inner + 4.0 * state_size * inner,
        }

    def step_flops(self, seen: int) -> dict[str, float]:
        """Count the recurrence's FLOPs per token: 5 per state element (decay, in, out)."""
        state_numbers = self.options.state_size * self.heads * self.options.head_dim
        return {"convolution": 2.0 * self.conv.taps.numel(), "scan": 5.0 * state_numbers}


def init_dt_bias(
    bias: Tensor, init: Initializers, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4
) -> None:
    """Draw `bias` such that Δ = softplus(bias) is log-uniform in [low, high), and at least
    `floor`."""

    def inverse_softplus(logs: Tensor) -> Tensor:
        dt = logs.exp().clamp(min=floor)
        return dt + torch.log(-torch.expm1(-dt))

    init.uniform(bias, math.log(low), math.log(high), inverse_softplus)
