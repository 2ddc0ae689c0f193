"""Hyena base class: y = (q ⊙ op(k ⊙ v))·W_out + b, after a short featurizer.

z = u·W                      D → 3D, no bias
q, k, v = conv3(z)           a causal three-tap filter per channel
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
    """Subclasses implement `mix`: the gates, and the operator between them. `skip_width` is d's
    length."""

    def __init__(self, options: HyenaOptions, width: int, *, skip_width: int = 0) -> None:
        super().__init__(options, width)
        widths = {"q": width, "k": width, "v": width}
        self.qkv = SplitLinear(width, widths, bias=options.qkv_bias)
        self.featurizer = ShortConvolution(
            3 * width, options.featurizer, bias=options.featurizer_bias
        )
        self.skip = nn.Parameter(torch.empty(skip_width)) if skip_width else None
        self.output = OutputLinear(width, width, bias=options.output_bias)

    def forward(self, u: Tensor, batch: BatchContext) -> Tensor:
        """Map u [b, t, width] to [b, t, width]."""
        # qkv [b, t, 3·width], of this rank's channels
        qkv = self.featurizer(
            self.qkv(u, batch.stored, joined=True), batch, kernel=self.options.kernel
        )
        out: Tensor = self.output(self.mix(qkv, batch))
        return out

    @abstractmethod
    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        """Return q ⊙ (h ∗ w + d·w) [b, t, width]; z [b, t, 3·width] holds q, k and v."""

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.qkv)
        self.featurizer.init_weights(init)
        init.output(self.output)
        if self.skip is not None:
            init.short_filter(self.skip, self.featurizer.taps.shape[1])

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Shard by channels."""
        qkv_shards = Sharded(0, (self.width,) * 3)
        return {
            **outputs("qkv", self.qkv),
            "featurizer.taps": qkv_shards,
            "featurizer.bias": qkv_shards,
            "skip": Sharded(0),
            **inputs("output"),
        }

    def flops(self, length: int) -> dict[str, float]:
        return {"convolution": 2.0 * self.featurizer.taps.numel()}
