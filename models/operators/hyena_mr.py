"""Hyena-MR: an explicit medium-length filter with a fixed decay per group.

    h_g[t] = ĥ_g[t] · exp(−a_g · t/(S−1)),  t < K        a: logarithmically spaced over groups
                                                    (`decay_repeats` times over)

S, the horizon, is a model constant: the row length in the first training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config.options.hyena_mr import HyenaMROptions
from ..config.precision import widen
from ..kernels.constants import constant
from ..layers.convolution import convolution_chunks, convolution_flops, untraced
from ..layers.initializers import Initializers
from ..parallel.axes import ALONE, Axes, Axis
from ..parallel.local_shard import ShardingSpec, shard_filters
from .base import BatchContext
from .hyena_long import LongHyena
from .short_conv import stateful_convolution

DECAYS = {"weak": (-2.0, 2.0), "normal": (-1.0, 2.0), "strong": (0.0, 2.0)}
"""Decay rates of the first and the last group, as powers of ten."""


class HyenaMR(LongHyena):
    Options = HyenaMROptions

    def __init__(self, options: HyenaMROptions, width: int) -> None:
        super().__init__(options, width)
        self.taps = nn.Parameter(torch.empty(options.groups, options.taps))

    def filtered(self, x: Tensor, batch: BatchContext, skip: Tensor, *, gated: bool) -> Tensor:
        taps = self.local_filters(apply_decay(self.taps, self.options, batch.axes.tensor), batch)
        options = self.options
        return stateful_convolution(
            x,
            taps,
            batch,
            "filter",
            gated=gated,
            skip=skip,
            method=options.method,
            kernel=options.kernel,
        )

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        ranks, method = axes.context.size, self.options.method
        return None if self.fused(device) else untraced(self.options.taps, method, ranks)

    def packing_chunks(self, length: int) -> set[int]:
        return convolution_chunks(self.options.taps, length, self.options.method)

    def init_weights(self, init: Initializers) -> None:
        super().init_weights(init)
        init.normal(self.taps, 1e-5 / math.sqrt(self.options.filter_horizon))

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        return {
            **super().sharding_spec(ranks),
            **shard_filters(["taps"], self.options.groups, ranks),
        }

    def flops(self, length: int) -> dict[str, float]:
        flops = super().flops(length)
        reach = self.taps.shape[1]
        flops_per_channel = convolution_flops(reach, length, self.options.method)
        flops["convolution"] += self.num_filtered_channels() * flops_per_channel
        return flops

    def step_flops(self, seen: int) -> dict[str, float]:
        flops = super().flops(1)
        flops["convolution"] += 2.0 * self.num_filtered_channels() * self.taps.shape[1]
        return flops


def apply_decay(taps: Tensor, options: HyenaMROptions, axis: Axis = ALONE) -> Tensor:
    """Return h = ĥ · exp(−a·t/(S−1)) for taps ĥ [groups, K], or this rank's groups."""
    taps = widen(taps)
    if options.decay == "none":
        return taps
    decays = constant(compute_decays, options, taps.shape[1], taps.device, taps.dtype)
    if len(taps) < options.groups:
        decays = decays[axis.part(options.groups)]
    return taps * decays


def compute_decays(
    options: HyenaMROptions, num_taps: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return exp(−a·t/(S−1)) [groups, num_taps]."""
    first_power, last_power = DECAYS[options.decay]
    num_rates = options.groups // options.decay_repeats
    rates = torch.logspace(first_power, last_power, num_rates, device=device, dtype=dtype)
    rates = rates.repeat(options.decay_repeats)
    time = torch.arange(num_taps, device=device, dtype=dtype)
    return torch.exp(-rates.unsqueeze(-1) * time / max(options.filter_horizon - 1, 1))
