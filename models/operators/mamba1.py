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
    inputs,
    joins_in_products,
    outputs,
    product_beside,
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
        x, z = self.input(u, batch.stored)
        x = self.conv(x, batch, silu=True, kernel=self.options.kernel)
        if len(self.select) == 1 and joins_in_products(x, self.select):
            x, selected = (y.unsqueeze(-2) for y in product_beside(x, self.select.squeeze(0)))
        else:
            x = x.unflatten(-1, (len(self.select), -1))
            selected = torch.einsum("blhp,hrp->blhr", x, self.select)
        selected = reduce(selected, batch.axes.tensor)
        delta, B, C = torch.split(selected, self.sizes, dim=-1)
        dt = torch.einsum("blhr,hpr->blhp", delta, self.dt)
        tensors = batch.state.tensors if batch.state is not None else {}
        y, tensors["ssm"] = gated_scan(
            x,
            dt,
            self.dt_bias,
            -torch.exp(widen(self.A_log)),
            B,
            C,
            self.D,
            z,
            batch.documents,
            state=tensors.get("ssm"),
            axis=batch.axes.context,
            chunk=self.options.chunk,
            kernel="torch" if batch.state is not None else self.options.kernel,
        )
        result: Tensor = self.output(y)
        return result

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
        """Projections of each head to δ, B and C, and from δ to the channels."""
        return {"select": tuple(self.sizes), "dt": (self.dt.shape[1],)}

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard by the channels of each head: its dt, B and C are sums over all its channels."""
        heads, _, channels = self.select.shape
        inner = (channels,) * heads
        return {
            **outputs("input", self.input, blocks=heads),
            "conv.taps": Sharded(0, inner),
            "conv.bias": Sharded(0, inner),
            "select": Sharded(2),
            **dict.fromkeys(("dt", "dt_bias", "A_log", "D"), Sharded(1)),
            **inputs("output", blocks=inner),
        }

    def flops(self, length: int) -> dict[str, float]:
        """Count the scan as a recurrence: for each state element an exponential, three products
        and a sum into it, and a product and a sum out of it."""
        return {
            "projections": 2.0 * (self.select.numel() + self.dt.numel()),
            "convolution": 2.0 * self.conv.taps.numel(),
            "scan": 7.0 * self.A_log.numel(),
        }
