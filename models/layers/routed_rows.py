"""Tokens to the rows of their experts, sorted by expert, and back, by the fused kernel or in plain
torch.

    rows[places[t, j]] = x[t]           y[t] = Σ_j weights[t, j] · rows[places[t, j]]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config.options.names import Kernel
from ..kernels import rms_norm
from ..kernels import routed_rows as kernels
from ..kernels.choice import uses_kernel


def places_of(experts: Tensor) -> Tensor:
    """Return the row of each choice among all rows sorted by expert, int64 [tokens, k]; `experts`
    are the choices."""
    order = experts.flatten().argsort(stable=True)
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter(0, order, rows).view_as(experts)


def spread(x: Tensor, places: Tensor, kernel: Kernel = "auto") -> Tensor:
    """Return the rows of x [tokens, width]."""
    if _fused(x, kernel):
        fused: Tensor = kernels.dispatch_rows(x, places)
        return fused
    choices = x if places.shape[1] == 1 else x.repeat_interleave(places.shape[1], dim=0)
    rows: Tensor = torch.empty_like(choices).index_copy(0, places.flatten(), choices)
    return rows


def collect(rows: Tensor, places: Tensor, weights: Tensor, kernel: Kernel = "auto") -> Tensor:
    """Return the weighted sum of each token's rows; `weights` are [tokens, k]."""
    if _fused(rows, kernel):
        fused: Tensor = kernels.combine_rows(rows, places, weights)
        return fused
    choices = rows.index_select(0, places.flatten()).unflatten(0, places.shape)
    summed: Tensor = (choices * weights.unsqueeze(-1).to(rows.dtype)).sum(dim=1)
    return summed


def _fused(x: Tensor, kernel: Kernel) -> bool:
    return uses_kernel(kernel, "routed_rows", x, rms_norm.unsupported_reason(x.shape[-1]))
