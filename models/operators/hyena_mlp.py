"""Short-Hyena MLP: a Hyena-SE with any width, in place of an MLP.

q, k, v = split(x·W)                 D → 3·hidden, then a filter with `featurizer` taps, if any
y = (q ⊙ (h ∗ (k ⊙ v)))·W_out        h[group, K], as in Hyena-SE
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.options.hyena_mlp import HyenaMLPOptions
from ..layers.initializers import Initializers
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..parallel.local_shard import Sharded, ShardingSpec, shard_filters
from ..parallel.tensor import select_local_filters
from .base import BatchContext, Operator
from .short_conv import ShortConvolution, gated_filter


class HyenaMLP(Operator):
    Options = HyenaMLPOptions

    def __init__(self, options: HyenaMLPOptions, width: int) -> None:
        super().__init__(options, width)
        widths = {"q": options.hidden, "k": options.hidden, "v": options.hidden}
        self.qkv = SplitLinear(width, widths, bias=options.bias)
        self.featurizer = (
            ShortConvolution(3 * options.hidden, options.featurizer, bias=False)
            if options.featurizer
            else None
        )
        self.taps = nn.Parameter(torch.empty(options.groups, options.taps))
        self.down = OutputLinear(options.hidden, width, bias=options.bias or options.output_bias)

    def forward(self, x: Tensor, batch: BatchContext) -> Tensor:
        """Map x [b, t, width] to [b, t, width]."""
        # qkv [b, t, 3·hidden], of this rank's channels
        options, axis = self.options, batch.axes.tensor
        taps = select_local_filters(self.taps, options.groups, options.hidden, axis)
        qkv = self.qkv(x, batch.stored, joined=True)
        if self.featurizer is not None:
            qkv = self.featurizer(qkv, batch, kernel=options.kernel)
        y = gated_filter(
            qkv,
            taps,
            batch,
            pregate=options.pregate,
            postgate=options.postgate,
            kernel=options.kernel,
        )
        out: Tensor = self.down(y)
        return out

    def init_weights(self, init: Initializers) -> None:
        init.linear(self.qkv)
        if self.featurizer is not None:
            self.featurizer.init_weights(init)
        init.short_filter(self.taps, self.options.featurizer or self.options.taps)
        init.output(self.down)

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        qkv_shards = Sharded(0, (self.options.hidden,) * 3)
        return {
            **outputs("qkv", self.qkv),
            **({"featurizer.taps": qkv_shards} if self.featurizer is not None else {}),
            **shard_filters(["taps"], self.options.groups, ranks),
            **inputs("down"),
        }

    def flops(self, length: int) -> dict[str, float]:
        taps = self.taps.shape[1] + 3 * self.options.featurizer
        return {"convolution": 2.0 * self.down.in_features * taps}
