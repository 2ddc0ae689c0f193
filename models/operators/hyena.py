"""Base of the Hyena operators: y = (q ⊙ op(k ⊙ v))·W_out + b, after a short featurizer.

z = u·W                      D → 3D, no bias
q, k, v = conv3(z)           a causal filter of three taps for each channel
w = k ⊙ v                    the gate before the operator
y = q ⊙ (h ∗ w + d·w)        the gate after it; d only for MR and LI (`hyena_long`)
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from ..config.options.hyena import HyenaOptions
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..parallel.local_shard import Sharded, ShardingSpec
from .base import BatchContext, Operator
from .short_conv import ShortConvolution


class Hyena(Operator):
    """Subclasses implement `mix`: the gates, and the operator between them. `skip` is the number of
    weights d."""

    def __init__(self, options: HyenaOptions, width: int, *, skip: int = 0) -> None:
        super().__init__(options, width)
        parts = {"q": width, "k": width, "v": width}
        self.qkv = SplitLinear(width, parts, bias=options.qkv_bias)
        self.featurizer = ShortConvolution(
            3 * width, options.featurizer, bias=options.featurizer_bias
        )
        self.skip = nn.Parameter(torch.empty(skip)) if skip else None
        self.output = OutputLinear(width, width, bias=options.output_bias)

    def forward(self, u: Tensor, batch: BatchContext) -> Tensor:
        z = self.featurizer(
            self.qkv(u, batch.stored, joined=True), batch, kernel=self.options.kernel
        )
        result: Tensor = self.output(self.mix(z, batch))
        return result

    @abstractmethod
    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        """Return q ⊙ (h ∗ w + d·w); z holds q, k and v, concatenated."""

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.qkv)
        self.featurizer.init_weights(init)
        init.output(self.output)
        if self.skip is not None:
            init.short_filter(self.skip, self.featurizer.taps.shape[1])

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard by channels."""
        thrice = Sharded(0, (self.width,) * 3)
        return {
            **outputs("qkv", self.qkv),
            "featurizer.taps": thrice,
            "featurizer.bias": thrice,
            "skip": Sharded(0),
            **inputs("output"),
        }

    def flops(self, length: int) -> dict[str, float]:
        return {"convolution": 2.0 * self.featurizer.taps.numel()}
