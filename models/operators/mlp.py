"""MLPs: gated (SwiGLU, GEGLU) and plain."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.options.mlp import GLUOptions, MLPOptions
from ..config.options.names import Activation, Kernel
from ..kernels import fp8, glu
from ..kernels.choice import uses_kernel
from ..kernels.fp8 import Quantized
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..parallel.local_shard import ShardingSpec
from .base import BatchContext, Operator

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}


def gate_for_product(
    linear: OutputLinear, x: Tensor, activation: Activation, kernel: Kernel
) -> tuple[Tensor, Quantized | None]:
    """Return `apply_gate` [..., width]; also in FP8 if `linear` reads and the kernel stores it."""
    if linear.takes_stored and uses_kernel(
        kernel, "glu", x, fp8.unsupported_reason(x.shape[-1] // 2)
    ):
        hidden, *stored = glu.glu_fp8(x, activation)
        return hidden, Quantized(*stored)
    return apply_gate(x, activation, kernel), None


def apply_gate(
    x: Tensor,
    activation: Activation,
    kernel: Kernel = "auto",
    *,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Return act(gate) ⊙ (up + offset) [..., width] for x [..., 2·width] = [gate, up]. With a
    `limit`, gates are clamped to at most it before, and ups to ± it."""
    if uses_kernel(kernel, "glu", x):
        fused: Tensor = glu.glu(x, activation, limit or 0.0, offset)
        return fused
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = clamp(gate, -math.inf, limit), clamp(up, -limit, limit)
    return ACTIVATIONS[activation](gate) * (up + offset if offset else up)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """Return x between two bounds. At a bound the gradient is 0: that of `torch.clamp` is 0 there
    from torch 2.15 on, and was 1 in 2.11."""
    return torch.where((x > low) & (x < high), x, x.detach().clamp(low, high))


class MLP(Operator):
    Options = MLPOptions

    def __init__(self, options: MLPOptions, width: int) -> None:
        super().__init__(options, width)
        self.up = SplitLinear(width, {"up": options.hidden}, bias=options.bias)
        self.down = OutputLinear(options.hidden, width, bias=options.bias)

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        """Map x [b, t, width] to [b, t, width]."""
        out: Tensor = self.down(
            ACTIVATIONS[self.options.activation](self.up(x, batch.stored, joined=True))
        )
        return out

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.up)
        init.output(self.down)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {**outputs("up", self.up), **inputs("down")}


class GLU(Operator):
    Options = GLUOptions

    def __init__(self, options: GLUOptions, width: int) -> None:
        super().__init__(options, width)
        widths = {"gate": options.hidden, "up": options.hidden}
        self.gate_up = SplitLinear(width, widths, bias=options.bias)
        self.down = OutputLinear(options.hidden, width, bias=options.bias)

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        """Map x [b, t, width] to [b, t, width]."""
        gate_up = self.gate_up(x, batch.stored, joined=True)
        if (multiplier := self.options.gate_multiplier) != 1:
            gate, up = gate_up.chunk(2, dim=-1)
            gate_up = torch.cat([multiplier * gate, up], dim=-1)
        out: Tensor = self.down(
            *gate_for_product(self.down, gate_up, self.options.activation, self.options.kernel)
        )
        return out

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.gate_up)
        init.output(self.down)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {**outputs("gate_up", self.gate_up), **inputs("down")}
