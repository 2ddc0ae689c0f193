"""Mamba-1's scan with softplus, D and gate, by the fused kernel or in plain torch.

Δ = softplus(dt + bias),  y = (scan(x, Δ, A, B, C) + D·x)·silu(z)
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..config.options.names import Kernel
from ..config.precision import widen
from ..documents import Documents
from ..kernels import selective_scan as kernels
from ..kernels.choice import uses_kernel
from ..parallel.axes import ALONE, Axis
from .scan import selective_scan


def gated_scan(
    x: Tensor,
    dt: Tensor,
    bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 32,
    kernel: Kernel = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y [rows, length, heads · channels] and the final state [rows, heads, channels, N].

    x and dt [rows, length, heads, channels], B and C [rows, length, heads, N], z like y; bias and D
    [heads, channels], A [heads, channels, N] below zero; state, the initial one, like the final
    one. `axis` is the context-parallel axis. Only plain torch reads `chunk`.
    """
    if not uses_kernel(kernel, "selective_scan", x, kernels.unsupported_reason(B)):
        return plain(x, dt, bias, A, B, C, D, z, documents, state=state, axis=axis, chunk=chunk)
    positions = documents.positions if documents is not None else None
    y, final, *_ = kernels.selective_scan(x, dt, bias, A, B, C, D, z, state, positions, axis.name)
    return y, final


def plain(
    x: Tensor,
    dt: Tensor,
    bias: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 32,
) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; shapes as in `gated_scan`."""
    y, final = selective_scan(
        widen(x),
        F.softplus(widen(dt) + widen(bias)),
        A,
        widen(B),
        widen(C),
        documents,
        state=state,
        axis=axis,
        chunk=chunk,
    )
    y = (y + widen(D) * widen(x)).flatten(2).to(x.dtype)
    return y * F.silu(z), final
