"""The short-Hyena MLP: a wide Hyena-SE without featurizer, used in place of an MLP.

q, k, v = split(x·W)                 D → 3·hidden
y = (q ⊙ (h ∗ (k ⊙ v)))·W_out        h[group, K], as in Hyena-SE
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..parallel.sharding import ShardingSpec, filters
from ..parallel.tensor import own_filters
from .base import BatchContext, FusedOptions, Operator, divides
from .short_conv import remembered_convolution


@dataclass(frozen=True, kw_only=True)
class HyenaMLPOptions(FusedOptions):
    """An MLP that looks a few tokens back."""

    kind: Literal["hyena-mlp"] = "hyena-mlp"
    hidden: int
    """Channels of the convolution."""
    groups: int
    """Filters; each is shared by hidden/groups neighbouring channels."""
    taps: int = 7
    """K, the filters' length in tokens."""
    bias: bool = False
    """Add biases in the projections."""

    def problems(self, width: int) -> Iterator[str]:
        yield from divides("groups", self.groups, "hidden", self.hidden)
        if not 1 <= self.taps <= 16:
            yield f"a short filter has 1 to 16 taps, not {self.taps}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"hidden channels": self.hidden}


class HyenaMLP(Operator):
    Options = HyenaMLPOptions

    def __init__(self, options: HyenaMLPOptions, width: int) -> None:
        super().__init__(options, width)
        parts = {"q": options.hidden, "k": options.hidden, "v": options.hidden}
        self.qkv = SplitLinear(width, parts, bias=options.bias)
        self.taps = nn.Parameter(torch.empty(options.groups, options.taps))
        self.down = OutputLinear(options.hidden, width, bias=options.bias)

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        options, axis = self.options, batch.axes.tensor
        taps = own_filters(self.taps, options.groups, options.hidden, axis)
        z = self.qkv(x, joined=True)
        y = remembered_convolution(z, taps, batch, "filter", gated=True, kernel=options.kernel)
        result: Tensor = self.down(y)
        return result

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.qkv)
        init.short_filter(self.taps, self.taps.shape[1])
        init.output(self.down)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {
            **outputs("qkv", self.qkv),
            **filters("taps", self.options.groups, ranks),
            **inputs("down"),
        }

    def flops(self, length: int) -> dict[str, float]:
        return {"convolution": 2.0 * self.down.in_features * self.taps.shape[1]}
