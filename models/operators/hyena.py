"""Base of the Hyena operators: y = (q ⊙ op(k ⊙ v))·W_out + b, after a short featurizer.

z = u·W                      D → 3D, no bias
q, k, v = conv3(z)           a causal filter of three taps for each channel
w = k ⊙ v                    the gate before the operator
y = q ⊙ (h ∗ w + d·w)        the gate after it; d only for MR and LI
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..initializers import Initializers
from ..layers.gated_convolution import gated_input
from ..layers.linear import OutputLinear, SplitLinear, inputs, outputs
from ..parallel.channels import by_channels
from ..parallel.sharding import Sharded, ShardingSpec
from .base import BatchContext, FusedOptions, Operator
from .short_conv import ShortConvolution, remembered_convolution


@dataclass(frozen=True, kw_only=True)
class HyenaOptions(FusedOptions):
    """Options of all Hyena operators."""

    featurizer: int = 3
    """Taps of the short filter on q, k and v."""
    featurizer_bias: bool = False
    """Add a bias in the featurizer."""
    qkv_bias: bool = False
    """Add a bias in the projection to q, k and v."""
    output_bias: bool = True
    """Add a bias in the output projection."""

    def problems(self, width: int) -> Iterator[str]:
        if self.featurizer < 1:
            yield f"featurizer must be at least 1, not {self.featurizer}"

    def tp_sizes(self, width: int) -> dict[str, int]:
        return {"channels": width}


class Hyena(Operator):
    """Subclasses implement `mix`: the gates, and the operator between them."""

    def __init__(self, options: HyenaOptions, width: int, *, skip: bool) -> None:
        super().__init__(options, width)
        parts = {"q": width, "k": width, "v": width}
        self.qkv = SplitLinear(width, parts, bias=options.qkv_bias)
        self.featurizer = ShortConvolution(
            3 * width, options.featurizer, bias=options.featurizer_bias
        )
        self.skip = nn.Parameter(torch.empty(width)) if skip else None
        self.output = OutputLinear(width, width, bias=options.output_bias)

    def forward(self, u: Tensor, batch: BatchContext) -> Tensor:
        z = self.featurizer(self.qkv(u, joined=True), batch, kernel=self.options.kernel)
        result: Tensor = self.output(self.mix(z, batch))
        return result

    @abstractmethod
    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        """Return q ⊙ (h ∗ w + d·w); z holds q, k and v, concatenated."""

    def convolved(self, z: Tensor, taps: Tensor, batch: BatchContext, **options: Any) -> Tensor:
        """`mix` with explicit filter taps."""
        return remembered_convolution(
            z,
            taps,
            batch,
            "filter",
            gated=True,
            skip=self.skip,
            kernel=self.options.kernel,
            **options,
        )

    def mix_by_channels(
        self,
        z: Tensor,
        whole_rows: Callable[[Tensor, slice, BatchContext], Tensor],
        batch: BatchContext,
    ) -> Tensor:
        """`mix` under context parallelism: `whole_rows` filters some channels of whole rows."""
        w = gated_input(z)
        whole = batch.whole(w.shape[1])
        axis = batch.axes.context
        y = by_channels(w, lambda x, channels: whole_rows(x, channels, whole), axis)
        assert self.skip is not None
        return z[..., : w.shape[-1]] * (y + self.skip * w)

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
