"""Hyena-SE: a short explicit filter h[group, K]; width/groups channels share a row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.options.hyena_se import HyenaSEOptions
from ..layers.initializers import Initializers
from ..parallel.local_shard import ShardingSpec, shard_filters
from ..parallel.tensor import select_local_filters
from .base import BatchContext
from .hyena import Hyena
from .short_conv import gated_filter


class HyenaSE(Hyena):
    Options = HyenaSEOptions

    def __init__(self, options: HyenaSEOptions, width: int) -> None:
        super().__init__(options, width)
        self.taps = nn.Parameter(torch.empty(options.groups, options.taps))

    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        taps = select_local_filters(self.taps, self.options.groups, self.width, batch.axes.tensor)
        options = self.options
        return gated_filter(
            z,
            taps,
            batch,
            pregate=options.pregate,
            postgate=options.postgate,
            kernel=options.kernel,
        )

    def init_weights(self, init: Initializers) -> None:
        super().init_weights(init)
        init.short_filter(self.taps, self.featurizer.taps.shape[1])

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {
            **super().sharding_spec(ranks),
            **shard_filters(["taps"], self.options.groups, ranks),
        }

    def flops(self, length: int) -> dict[str, float]:
        flops = super().flops(length)
        flops["convolution"] += 2.0 * self.width * self.taps.shape[1]
        return flops
