"""Dispatch tokens to rows sorted by expert, and combine them: fused kernel, or plain torch.

rows[row_ids[t, j]] = x[t]           y[t] = Σ_j weights[t, j] · rows[row_ids[t, j]]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config.options.names import Kernel
from ..kernels import rms_norm
from ..kernels import routed_rows as kernels
from ..kernels.choice import uses_kernel


def sort_choices(experts: Tensor) -> Tensor:
    """Return row_ids int64 [tokens, k]: each choice's row when all are sorted by expert. experts
    [tokens, k] holds the choices."""
    order = experts.flatten().argsort(stable=True)
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter(0, order, rows).view_as(experts)


def dispatch(x: Tensor, row_ids: Tensor, kernel: Kernel = "auto") -> Tensor:
    """Return rows [tokens · k, width], sorted by expert, for x [tokens, width]."""
    if _fused(x, kernel):
        fused: Tensor = kernels.dispatch_rows(x, row_ids)
        return fused
    choices = x if row_ids.shape[1] == 1 else x.repeat_interleave(row_ids.shape[1], dim=0)
    rows: Tensor = torch.empty_like(choices).index_copy(0, row_ids.flatten(), choices)
    return rows


def combine(rows: Tensor, row_ids: Tensor, weights: Tensor, kernel: Kernel = "auto") -> Tensor:
    """Sum each token's rows, weighted by weights [tokens, k]; return [tokens, width]."""
    if _fused(rows, kernel):
        fused: Tensor = kernels.combine_rows(rows, row_ids, weights)
        return fused
    choices = rows.index_select(0, row_ids.flatten()).unflatten(0, row_ids.shape)
    summed: Tensor = (choices * weights.unsqueeze(-1).to(rows.dtype)).sum(dim=1)
    return summed


def _fused(x: Tensor, kernel: Kernel) -> bool:
    return uses_kernel(kernel, "routed_rows", x, rms_norm.unsupported_reason(x.shape[-1]))
