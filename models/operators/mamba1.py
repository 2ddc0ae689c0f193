"""Mamba-1: a diagonal state space for each channel; the input selects Δ, B and C.

    x, z = split(u·W)            x ← silu(conv4(x) + b)
    δ, B, C = split(x·W_x)       Δ = softplus(δ·W_Δ + b_Δ)
    S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t·B_t           A = −exp(A_log)
    y_t = S_t·C_t + D·x_t        out = (y·silu(z))·W_out

Zamba's has heads: W_x and W_Δ are block-diagonal, and each head has its own B and C.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.options.mamba1 import Mamba1Options
from ..config.precision import widen
from ..layers.gated_scan import gated_scan
from ..layers.initializers import Initializers
from ..layers.linear import (
    OutputLinear,
    SplitLinear,
    fuses_gradient_sums,
    inputs,
    outputs,
    product_with_input,
)
from ..parallel.local_shard import Sharded, ShardingSpec
from ..parallel.tensor import reduce
from .base import BatchContext, Operator
from .mamba2 import init_dt_bias
from .short_conv import ShortConvolution


class Mamba1(Operator):
    Options = Mamba1Options
    no_decay = full_precision = ("dt_bias", "A_log", "D")

    def __init__(self, options: Mamba1Options, width: int) -> None:
        super().__init__(options, width)
        inner = options.expand * width
        rank, size, heads = options.rank(width), options.state_size, options.heads
        channels = inner // heads
        self.sizes = [rank, size, size]
        self.input = SplitLinear(width, {"x": inner, "z": inner})
        self.conv = ShortConvolution(inner, options.conv, bias=True)
        self.select = nn.Parameter(torch.empty(heads, sum(self.sizes), channels))
        self.dt = nn.Parameter(torch.empty(heads, channels, rank))
        self.dt_bias = nn.Parameter(torch.empty(heads, channels))
        self.A_log = nn.Parameter(torch.empty(heads, channels, size))
        self.D = nn.Parameter(torch.empty(heads, channels))
        self.output = OutputLinear(inner, width, bias=False)

    def forward(self, u: Tensor, batch: BatchContext) -> Tensor:
        """Map u [b, t, width] to [b, t, width]. This rank holds p channels in each of h heads, with
        n state elements per channel; δ has rank r."""
        # x, z [b, t, h·p]   dBC [b, t, h, r + 2·n]   B, C [b, t, h, n]   dt [b, t, h, p]
        x, z = self.input(u, batch.stored)
        x = self.conv(x, batch, silu=True, kernel=self.options.kernel)
        if len(self.select) == 1 and fuses_gradient_sums(x, self.select):
            x, dBC = (y.unsqueeze(-2) for y in product_with_input(x, self.select.squeeze(0)))
        else:
            x = x.unflatten(-1, (len(self.select), -1))
            dBC = torch.einsum("blhp,hrp->blhr", x, self.select)
        dBC = reduce(dBC, batch.axes.tensor)
        dt_low, B, C = torch.split(dBC, self.sizes, dim=-1)
        dt = torch.einsum("blhr,hpr->blhp", dt_low, self.dt)
        cache = batch.state.tensors if batch.state is not None else {}
        y, cache["ssm"] = gated_scan(
            x,
            dt,
            self.dt_bias,
            -torch.exp(widen(self.A_log)),
            B,
            C,
            self.D,
            z,
            batch.documents,
            state=cache.get("ssm"),
            axis=batch.axes.context,
            chunk=self.options.chunk,
            kernel="torch" if batch.state is not None else self.options.kernel,
        )
        out: Tensor = self.output(y)
        return out

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.input)
        self.conv.init_weights(init)
        init.matrix(self.select)
        bound = self.dt.shape[-1] ** -0.5
        init.uniform(self.dt, -bound, bound)
        init_dt_bias(self.dt_bias, init)
        init.constant(self.A_log, torch.arange(1, self.options.state_size + 1).log())
        init.constant(self.D, 1.0)
        init.output(self.output)

    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Return the per-head projections: to δ, B and C, and from δ to dt."""
        return {"select": tuple(self.sizes), "dt": (self.dt.shape[1],)}

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard each head's channels: its dt, B and C are sums over all channels."""
        heads, _, channels = self.select.shape
        head_blocks = (channels,) * heads
        return {
            **outputs("input", self.input, blocks=heads),
            "conv.taps": Sharded(0, head_blocks),
            "conv.bias": Sharded(0, head_blocks),
            "select": Sharded(2),
            **dict.fromkeys(("dt", "dt_bias", "A_log", "D"), Sharded(1)),
            **inputs("output", blocks=head_blocks),
        }

    def flops(self, length: int) -> dict[str, float]:
        """Count FLOPs per token, the scan as a recurrence: 7 per state element (an exponential,
        three products and a sum in, a product and a sum out)."""
        return {
            "projections": 2.0 * (self.select.numel() + self.dt.numel()),
            "convolution": 2.0 * self.conv.taps.numel(),
            "scan": 7.0 * self.A_log.numel(),
        }
