"""Hyena-LI, free-form: a filter as long as its horizon, computed by a small sine network.

    f(t) = [t/(S−1), cos and −sin of 16 frequencies at 2πt/S]        33 features, fixed
    h(t) = W₃·sin(ω·(W₂·sin(ω·(W₁·sin(ω·(W₀·f(t))))))) · exp(−|α|·t/(S−1))

Feature count, inner layer count, initial ω and α's range are options; α may be learned.

Such a filter has no finite state: generation keeps the inputs, and packed documents are convolved
one by one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.options.hyena_li_freeform import HyenaLIFreeformOptions
from ..config.precision import widen
from ..layers.convolution import convolution_chunks, convolution_flops, untraced
from ..layers.initializers import Initializers
from ..parallel.axes import Axes, Axis
from ..parallel.channels import ALL
from ..parallel.local_shard import ShardingSpec, shard_filters
from .base import BatchContext
from .hyena_long import LongHyena
from .short_conv import stateful_convolution


class SliceableLinear(nn.Linear):
    """A linear map that can compute a slice of the outputs."""

    def forward(self, x: Tensor, outputs: slice = ALL) -> Tensor:
        """Map x [..., in] to a range of outputs, [..., outputs]."""
        return F.linear(x, self.weight[outputs])


class HyenaLIFreeform(LongHyena):
    Options = HyenaLIFreeformOptions
    once = ("layers", "last")
    full_precision = ("decay",)

    def __init__(self, options: HyenaLIFreeformOptions, width: int) -> None:
        super().__init__(options, width)
        inner = options.filter_width
        self.layers = nn.ModuleList(
            [
                nn.Linear(options.features, inner),
                *(nn.Linear(inner, inner) for _ in range(options.inner_layers)),
            ]
        )
        self.frequency = nn.Parameter(torch.empty(inner))
        self.last = SliceableLinear(inner, self.groups, bias=False)
        self.decay = nn.Parameter(torch.empty(self.groups)) if options.learned_decay else None

    def taps(self, length: int, filters: slice, axis: Axis) -> Tensor:
        """Compute h [filters, length] for a range of this rank's filters; length ≤ horizon."""
        horizon = self.options.filter_horizon
        dtype = torch.promote_types(self.frequency.dtype, torch.float32)
        step = torch.arange(length, device=self.frequency.device, dtype=dtype)
        time = (step / (horizon - 1)).unsqueeze(-1)
        num_bands = self.options.features // 2
        bands = torch.linspace(1e-4, num_bands - 1, num_bands, device=step.device, dtype=dtype)
        angle = (2 * math.pi / horizon * step).unsqueeze(-1) * bands
        hidden = torch.cat([time, angle.cos(), -angle.sin()], dim=-1).to(self.frequency.dtype)
        for layer in self.layers:
            hidden = torch.sin(self.frequency * layer(hidden))
        if self.decay is not None:
            decay = widen(self.decay)
        else:
            decay = self.decays(step)
            if self.groups % axis.size == 0:
                decay = decay[axis.part(self.groups)]
        decay = decay[filters].abs()
        return (widen(self.last(hidden, filters)) * torch.exp(-time * decay)).T

    def decays(self, like: Tensor) -> Tensor:
        """Return the initial α [groups], with `like`'s dtype and device."""
        slowest, fastest = (
            math.log(0.01) / decay_option
            for decay_option in (self.options.slow_decay, self.options.fast_decay)
        )
        return torch.linspace(slowest, fastest, self.groups, device=like.device, dtype=like.dtype)

    def filtered(self, x: Tensor, batch: BatchContext, skip: Tensor, *, gated: bool) -> Tensor:
        if batch.axes.context.size == 1:
            num_channels = x.shape[-1] // (3 if gated else 1)
            return self.filter_rows(x, ALL, num_channels, batch, gated=gated, skip=skip)
        return self.filtered_by_channels(x, self.filter_rows, batch, skip, gated=gated)

    def filter_rows(
        self,
        x: Tensor,
        channel_range: slice,
        num_channels: int,
        batch: BatchContext,
        **options: Any,
    ) -> Tensor:
        """Filter x [rows, length, channels]: full rows, and the channels in `channel_range`."""
        state = batch.state
        max_length = state.capacity if state is not None else x.shape[1]
        reach = min(max_length, self.options.filter_horizon)

        def compute_taps(filters: slice) -> Tensor:
            return self.taps(reach, filters, batch.axes.tensor)

        taps = self.taps_for_channels(compute_taps, num_channels, channel_range, batch)
        options["kernel"] = self.options.kernel
        return stateful_convolution(x, taps, batch, "filter", **options)

    def untraced(self, axes: Axes, device: torch.device) -> str | None:
        reach, ranks = self.options.filter_horizon, axes.context.size
        return None if self.fused(device) else untraced(reach, "auto", ranks)

    def packing_chunks(self, length: int) -> set[int]:
        return convolution_chunks(min(length, self.options.filter_horizon), length)

    def init_weights(self, init: Initializers) -> None:
        super().init_weights(init)
        for layer in (*self.layers, self.last):
            assert isinstance(layer, nn.Linear)
            bound = layer.in_features**-0.5
            init.uniform(layer.weight, -bound, bound)
            if layer.bias is not None:
                init.uniform(layer.bias, -bound, bound)
        if self.options.last_start == "xavier":
            init.normal(self.last.weight, math.sqrt(2 / sum(self.last.weight.shape)))
        init.constant(self.frequency, self.options.frequency)
        if self.decay is not None:
            init.constant(self.decay, self.decays(torch.empty(0)))

    def sharding_spec(self, ranks: int) -> ShardingSpec:
        filter_shards = shard_filters(["last.weight", "decay"], self.groups, ranks)
        return {**super().sharding_spec(ranks), **filter_shards}

    def flops(self, length: int) -> dict[str, float]:
        """FLOPs per token, without the network that computes the filter: it runs once a batch."""
        flops = super().flops(length)
        reach = min(length, self.options.filter_horizon)
        flops["convolution"] += self.num_filtered_channels() * convolution_flops(reach, length)
        return flops

    def step_flops(self, seen: int) -> dict[str, float]:
        """FLOPs per token: the newest output over all cached inputs, and the filter, recomputed."""
        flops = super().flops(1)
        reach = min(seen, self.options.filter_horizon)
        flops["convolution"] += 2.0 * self.num_filtered_channels() * reach
        network = (*self.layers.parameters(), *self.last.parameters())
        flops["filter"] = 2.0 * reach * sum(p.numel() for p in network if p.dim() == 2)
        return flops
