"""A causal convolution and the gates around it, by the fused kernel that reaches its filter.

    y = q ⊙ act(h ∗ w + bias + skip ⊙ w),  w = k ⊙ v

A token of x holds q, k and v one after the other; where nothing is gated, it is w.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from .convolution import Method, causal_convolution
from .documents import Documents
from .kernels import short_convolution, toeplitz
from .kernels.choice import Kernel, chosen


def gated_convolution(
    x: Tensor,
    taps: Tensor,
    documents: Documents | None = None,
    *,
    gated: bool = False,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    silu: bool = False,
    history: Tensor | None = None,
    method: Method = "auto",
    kernel: Kernel = "auto",
) -> Tensor:
    """x [rows, length, width or 3·width], taps [groups, K] → [rows, length, width].

    `history` [rows, K−1, width] is what w was before the row. `method` is of the plain form.
    """
    positions = documents.positions if documents is not None else None
    fused: Tensor
    if taps.shape[1] <= short_convolution.REACHES:
        beyond = short_convolution.beyond(taps, gated=gated, silu=silu)
        if chosen(kernel, "short_convolution", x, beyond):
            fused = short_convolution.short_convolution(
                x, taps, bias, skip, history, positions, gated, silu
            )
            return fused
    else:
        beyond = toeplitz.beyond(taps, bias=bias is not None, silu=silu)
        if chosen(kernel, "toeplitz", x, beyond):
            fused = toeplitz.toeplitz(x, taps, skip, history, positions, gated)
            return fused
    return plain(
        x,
        taps,
        documents,
        gated=gated,
        bias=bias,
        skip=skip,
        silu=silu,
        history=history,
        method=method,
    )


def plain(
    x: Tensor,
    taps: Tensor,
    documents: Documents | None = None,
    *,
    gated: bool = False,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    silu: bool = False,
    history: Tensor | None = None,
    method: Method = "auto",
) -> Tensor:
    """What the kernels compute, in torch."""
    w = gated_input(x) if gated else x
    y = causal_convolution(w, taps, documents, history=history, method=method)
    if bias is not None:
        y = y + bias
    if skip is not None:
        y = y + skip * w
    if silu:
        y = F.silu(y)
    return x[..., : w.shape[-1]] * y.to(x.dtype) if gated else y


def gated_input(x: Tensor) -> Tensor:
    """k ⊙ v."""
    _, k, v = x.chunk(3, dim=-1)
    return k * v
