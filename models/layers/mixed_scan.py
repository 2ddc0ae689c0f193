"""Mamba-2's scan of x, B and C as one tensor, with softplus and D, by the fused kernel or in plain
torch.

Δ = softplus(dt + bias),  y = scan(x, Δ, −exp(A_log), B, C) + D·x
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.options.names import Kernel
from ..config.precision import widen
from ..documents import Documents
from ..kernels import ssd as kernels
from ..kernels.choice import chosen
from ..parallel.axes import ALONE, Axis
from .scan import ssd


def mixed_scan(
    mixed: Tensor,
    dt: Tensor,
    bias: Tensor,
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
    """mixed [rows, length, x | B | C], for x heads · head_dim channels and for B and C groups ·
    state_size; dt [rows, length, heads]; bias, A_log and D [heads]. Return y [rows, length,
    heads · head_dim] and the state, which is [rows, heads, head_dim, state_size]. `axis` is the
    context-parallel axis. Plain torch alone uses `chunk`.
    """
    if not chosen(kernel, "ssd", mixed, kernels.beyond(head_dim, state_size)):
        return plain(
            mixed,
            dt,
            bias,
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
        mixed, dt, bias, A_log, D, state, positions, head_dim, state_size, axis.name
    )
    return y, final


def plain(
    mixed: Tensor,
    dt: Tensor,
    bias: Tensor,
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
    """Reference implementation of the kernel in torch."""
    inner = dt.shape[-1] * head_dim
    shared = (mixed.shape[-1] - inner) // 2
    x, B, C = mixed.split([inner, shared, shared], dim=-1)
    x = x.unflatten(-1, (-1, head_dim))
    B, C = (widen(t.unflatten(-1, (-1, state_size))) for t in (B, C))
    step = F.softplus(widen(dt) + widen(bias))
    A = -torch.exp(widen(A_log))
    y, final = ssd(widen(x), step, A, B, C, documents, state=state, axis=axis, chunk=chunk)
    y = y + widen(D).unsqueeze(-1) * widen(x)
    return y.flatten(2).to(mixed.dtype), final
