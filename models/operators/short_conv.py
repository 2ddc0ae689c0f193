"""The short causal convolution that follows a projection in Mamba and Hyena."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config.options.names import Kernel
from ..layers.convolution import next_history
from ..layers.gated_convolution import gated_convolution, gated_input
from ..layers.initializers import Initializers
from ..parallel.halo import preceding
from .base import BatchContext


class ShortConvolution(nn.Module):
    """y_t = Σ_{j<K} taps[c, j] · x[t−j, c] (+ bias), for each channel c."""

    def __init__(self, width: int, reach: int, *, bias: bool) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(width, reach))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(
        self,
        x: Tensor,
        batch: BatchContext,
        name: str = "short",
        *,
        silu: bool = False,
        kernel: Kernel = "auto",
    ) -> Tensor:
        return remembered_convolution(
            x, self.taps, batch, name, bias=self.bias, silu=silu, kernel=kernel
        )

    def init_weights(self, init: Initializers) -> None:
        init.short_filter(self.taps, self.taps.shape[1])
        if self.bias is not None:
            init.short_filter(self.bias, self.taps.shape[1])


def gated_filter(
    z: Tensor, taps: Tensor, batch: BatchContext, *, pregate: bool, postgate: bool, kernel: Kernel
) -> Tensor:
    """q ⊙ (h ∗ (k ⊙ v)) for z = [q, k, v], without k or q where a gate is left out."""
    if pregate and postgate:
        return remembered_convolution(z, taps, batch, "filter", gated=True, kernel=kernel)
    q, k, v = z.chunk(3, dim=-1)
    w = k * v if pregate else v.contiguous()
    y = remembered_convolution(w, taps, batch, "filter", kernel=kernel)
    return q * y if postgate else y


def remembered_convolution(
    x: Tensor,
    taps: Tensor,
    batch: BatchContext,
    name: str,
    *,
    gated: bool = False,
    **options: Any,
) -> Tensor:
    """A (gated) convolution with inputs from before x: in generation those kept in the operator's
    state, under context parallelism a halo from the ranks before."""
    axis, reach, past = batch.axes.context, taps.shape[1], None
    if batch.state is not None:
        w = gated_input(x) if gated else x
        tensors = batch.state.tensors
        past = next_history(w[:, :0], tensors.get(name), reach)
        tensors[name] = next_history(w, past, reach)
        options["kernel"] = "torch"  # token by token
    elif axis.size > 1:
        last = x[:, -reach:]
        past = preceding(gated_input(last) if gated else last, reach - 1, axis, part=x.shape[1])
    return gated_convolution(x, taps, batch.documents, gated=gated, history=past, **options)
