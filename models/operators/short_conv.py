"""The short causal convolution that Mamba and Hyena put behind a projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..convolution import Method, causal_convolution, next_history
from ..initialise import Initialiser
from .base import Context


class ShortConvolution(nn.Module):
    """y_t = Σ_{j<K} taps[c, j] · x[t−j, c] (+ bias), for each channel c."""

    def __init__(self, width: int, reach: int, *, bias: bool) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.empty(width, reach))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor, context: Context, name: str = "short") -> Tensor:
        y = remembered_convolution(x, self.taps, context, name)
        return y if self.bias is None else y + self.bias

    def init_weights(self, init: Initialiser) -> None:
        init.short_filter(self.taps, self.taps.shape[1])
        if self.bias is not None:
            init.short_filter(self.bias, self.taps.shape[1])


def remembered_convolution(
    x: Tensor, taps: Tensor, context: Context, name: str, method: Method = "auto"
) -> Tensor:
    """A causal convolution that keeps its last inputs in the context's state, if there is one."""
    if context.state is None:
        return causal_convolution(x, taps, context.documents, method=method)
    tensors = context.state.tensors
    past = next_history(x[:, :0], tensors.get(name), taps.shape[1])
    tensors[name] = next_history(x, past, taps.shape[1])
    return causal_convolution(x, taps, context.documents, history=past, method=method)
