"""The short-Hyena MLP: a Hyena-SE of any width, used in place of an MLP.

q, k, v = split(x·W)                 D → 3·hidden, then a filter of `featurizer` taps, if any
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
from ..parallel.sharding import Sharded, ShardingSpec, filters
from ..parallel.tensor import own_filters
from .base import BatchContext, FusedOptions, Operator, divides
from .short_conv import ShortConvolution, gated_filter


@dataclass(frozen=True, kw_only=True)
class HyenaMLPOptions(FusedOptions):
    """An MLP that looks a few tokens back."""

    newer = ("featurizer", "pregate", "postgate", "output_bias")
    kind: Literal["hyena-mlp"] = "hyena-mlp"
    hidden: int
    """Channels of the convolution."""
    groups: int
    """Filters; each is shared by hidden/groups neighbouring channels."""
    taps: int = 7
    """K, the filters' length in tokens."""
    featurizer: int = 0
    """Taps of a short filter on q, k and v, as Savanna's MLP has; 0: none."""
    pregate: bool = True
    """Multiply v by k before the filter; without it, k is computed and not used."""
    postgate: bool = True
    """Multiply by q after the filter; without it, q is computed and not used."""
    bias: bool = False
    """Add biases in the projections."""
    output_bias: bool = False
    """Add a bias in the output projection alone."""

    def problems(self, width: int) -> Iterator[str]:
        yield from divides("groups", self.groups, "hidden", self.hidden)
        if not 1 <= self.taps <= 16:
            yield f"a short filter has 1 to 16 taps, not {self.taps}"
        if not 0 <= self.featurizer <= 16:
            yield f"featurizer has 1 to 16 taps, or 0 for none, not {self.featurizer}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"hidden channels": self.hidden}


class HyenaMLP(Operator):
    Options = HyenaMLPOptions

    def __init__(self, options: HyenaMLPOptions, width: int) -> None:
        super().__init__(options, width)
        parts = {"q": options.hidden, "k": options.hidden, "v": options.hidden}
        self.qkv = SplitLinear(width, parts, bias=options.bias)
        self.featurizer = (
            ShortConvolution(3 * options.hidden, options.featurizer, bias=False)
            if options.featurizer
            else None
        )
        self.taps = nn.Parameter(torch.empty(options.groups, options.taps))
        self.down = OutputLinear(options.hidden, width, bias=options.bias or options.output_bias)

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        options, axis = self.options, batch.axes.tensor
        taps = own_filters(self.taps, options.groups, options.hidden, axis)
        z = self.qkv(x, batch.stored, joined=True)
        if self.featurizer is not None:
            z = self.featurizer(z, batch, kernel=options.kernel)
        y = gated_filter(
            z,
            taps,
            batch,
            pregate=options.pregate,
            postgate=options.postgate,
            kernel=options.kernel,
        )
        result: Tensor = self.down(y)
        return result

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.qkv)
        if self.featurizer is not None:
            self.featurizer.init_weights(init)
        init.short_filter(self.taps, self.options.featurizer or self.options.taps)
        init.output(self.down)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        thrice = Sharded(0, (self.options.hidden,) * 3)
        return {
            **outputs("qkv", self.qkv),
            **({"featurizer.taps": thrice} if self.featurizer is not None else {}),
            **filters(["taps"], self.options.groups, ranks),
            **inputs("down"),
        }

    def flops(self, length: int) -> dict[str, float]:
        taps = self.taps.shape[1] + 3 * self.options.featurizer
        return {"convolution": 2.0 * self.down.in_features * taps}
