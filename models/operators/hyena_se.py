"""Hyena-SE: a short explicit filter h[group, K]; width/groups channels share a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..initializers import Initializers
from ..parallel.sharding import ShardingSpec, filters
from ..parallel.tensor import own_filters
from .base import BatchContext, divides
from .hyena import Hyena, HyenaOptions
from .short_conv import gated_filter


@dataclass(frozen=True, kw_only=True)
class HyenaSEOptions(HyenaOptions):
    """Hyena, short explicit filter."""

    newer = ("pregate", "postgate")
    kind: Literal["hyena-se"] = "hyena-se"
    groups: int
    """Filters; each is shared by width/groups neighbouring channels."""
    taps: int = 7
    """K, the filter's length in tokens."""
    pregate: bool = True
    """Multiply v by k before the filter; without it, k is computed and not used."""
    postgate: bool = True
    """Multiply by q after the filter; without it, q is computed and not used."""

    def problems(self, width: int) -> Iterator[str]:
        yield from super().problems(width)
        yield from divides("groups", self.groups, "the width", width)
        if not 1 <= self.taps <= 16:
            yield f"a short filter has 1 to 16 taps, not {self.taps}; hyena-mr has longer ones"


class HyenaSE(Hyena):
    Options = HyenaSEOptions

    def __init__(self, options: HyenaSEOptions, width: int) -> None:
        super().__init__(options, width)
        self.taps = nn.Parameter(torch.empty(options.groups, options.taps))

    def mix(self, z: Tensor, batch: BatchContext) -> Tensor:
        taps = own_filters(self.taps, self.options.groups, self.width, batch.axes.tensor)
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
        return {**super().sharding_spec(ranks), **filters(["taps"], self.options.groups, ranks)}

    def flops(self, length: int) -> dict[str, float]:
        flops = super().flops(length)
        flops["convolution"] += 2.0 * self.width * self.taps.shape[1]
        return flops
