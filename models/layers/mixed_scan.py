"""Mamba-2's scan with x, B and C in a single tensor, softplus and D: fused kernel, or plain torch.

Δ = softplus(dt + dt_bias),  y = scan(x, Δ, −exp(A_log), B, C) + D·x
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.options.names import Kernel
from ..config.precision import widen
from ..documents import Documents
from ..kernels import ssd as kernels
from ..kernels.choice import uses_kernel
from ..kernels.ssd_limits import unsupported_reason
from ..parallel.axes import ALONE, Axis
from .scan import ssd


def mixed_scan(
    xBC: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    documents: Documents | None = None,
    *,
    head_dim: int,
    state_size: int,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 64,
    kernel: Kernel = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y [rows, length, heads · head_dim] and the final state [rows, heads, head_dim,
    state_size].

    xBC [rows, length, heads · head_dim + 2 · groups · state_size] holds x, B and C; dt [rows,
    length, heads]; dt_bias, A_log, D [heads]; state, the initial one, like the final one. `axis` is
    the context-parallel axis. Only plain torch reads `chunk`.
    """
    if not uses_kernel(kernel, "ssd", xBC, unsupported_reason(head_dim, state_size)):
        return plain(
            xBC,
            dt,
            dt_bias,
            A_log,
            D,
            documents,
            head_dim=head_dim,
            state_size=state_size,
            state=state,
            axis=axis,
            chunk=chunk,
        )
    positions = documents.positions if documents is not None else None
    y, final, *_ = kernels.ssd(
        xBC, dt, dt_bias, A_log, D, state, positions, head_dim, state_size, axis.name
    )
    return y, final


def plain(
    xBC: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    documents: Documents | None = None,
    *,
    head_dim: int,
    state_size: int,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Torch twin of the kernel; shapes as in `mixed_scan`."""
    inner = dt.shape[-1] * head_dim
    BC_width = (xBC.shape[-1] - inner) // 2
    x, B, C = xBC.split([inner, BC_width, BC_width], dim=-1)
    x = x.unflatten(-1, (-1, head_dim))
    B, C = (widen(t.unflatten(-1, (-1, state_size))) for t in (B, C))
    delta = F.softplus(widen(dt) + widen(dt_bias))
    A = -torch.exp(widen(A_log))
    y, final = ssd(widen(x), delta, A, B, C, documents, state=state, axis=axis, chunk=chunk)
    y = y + widen(D).unsqueeze(-1) * widen(x)
    return y.flatten(2).to(xBC.dtype), final
