"""The short causal convolution that follows a projection in Mamba and Hyena."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config.options.names import Kernel
from ..layers.convolution import next_history
from ..layers.gated_convolution import gated_convolution, gated_input
from ..layers.initializers import Initializers
from ..parallel.halo import receive_halo
from .base import BatchContext


class ShortConvolution(nn.Module):
    """y_t = Σ_{j<K} taps[c, j] · x[t−j, c] (+ bias), for each channel c."""

    def __init__(self, width: int, num_taps: int, *, bias: bool) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(width, num_taps))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(
        self,
        x: Tensor,
        batch: BatchContext,
        cache_name: str = "short",
        *,
        silu: bool = False,
        kernel: Kernel = "auto",
    ) -> Tensor:
        """Map x [b, t, width] to the same shape. `cache_name` is the state's key for earlier
        inputs."""
        return stateful_convolution(
            x, self.taps, batch, cache_name, bias=self.bias, silu=silu, kernel=kernel
        )

    def init_weights(self, init: Initializers) -> None:
        init.short_filter(self.taps, self.taps.shape[1])
        if self.bias is not None:
            init.short_filter(self.bias, self.taps.shape[1])


def gated_filter(
    qkv: Tensor, taps: Tensor, batch: BatchContext, *, pregate: bool, postgate: bool, kernel: Kernel
) -> Tensor:
    """Return q ⊙ (h ∗ (k ⊙ v)) [b, t, width] for [q, k, v] [b, t, 3·width], without k or q where a
    gate is left out. taps h [groups, K]."""
    if pregate and postgate:
        return stateful_convolution(qkv, taps, batch, "filter", gated=True, kernel=kernel)
    q, k, v = qkv.chunk(3, dim=-1)
    w = k * v if pregate else v.contiguous()
    y = stateful_convolution(w, taps, batch, "filter", kernel=kernel)
    return q * y if postgate else y


def stateful_convolution(
    x: Tensor,
    taps: Tensor,
    batch: BatchContext,
    cache_name: str,
    *,
    gated: bool = False,
    **options: Any,
) -> Tensor:
    """Return a (gated) convolution [b, t, width] that sees K−1 inputs before x: in generation from
    the operator's state, under context parallelism a halo from earlier ranks.

    x [b, t, width], or [b, t, 3·width] if `gated`; taps [groups, K].
    """
    axis, reach, history = batch.axes.context, taps.shape[1], None
    if batch.state is not None:
        w = gated_input(x) if gated else x
        cache = batch.state.tensors
        history = next_history(w[:, :0], cache.get(cache_name), reach)
        cache[cache_name] = next_history(w, history, reach)
        options["kernel"] = "torch"  # token by token
    elif axis.size > 1:
        last_tokens = x[:, -reach:]
        history = receive_halo(
            gated_input(last_tokens) if gated else last_tokens,
            reach - 1,
            axis,
            local_length=x.shape[1],
        )
    return gated_convolution(x, taps, batch.documents, gated=gated, history=history, **options)
