"""The gated delta rule with q, k and v in a single tensor, their norms, softplus and sigmoid.

q, k ← q/|q|, k/|k|    g = −exp(A_log)·softplus(decay + dt_bias)    β = max_beta·sigmoid(beta)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....console.errors import LayoutError
from ...config.options.names import FLA_INSTALL, DeltaKernel
from ...config.precision import widen
from ...documents import Documents, Spans
from ...kernels import delta as kernels
from ...kernels import delta_fla
from ...kernels.choice import refuse, uses_kernel
from ...parallel.axes import ALONE, Axis
from .rule import delta_rule

NORM_EPS = 1e-6
"""Epsilon in |x| = √(Σ x² + ε), as published."""


def delta_scan(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    documents: Documents | None = None,
    *,
    key_head_dim: int,
    value_head_dim: int,
    max_beta: int = 1,
    qk_norm: bool = True,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 64,
    kernel: DeltaKernel = "auto",
) -> tuple[Tensor, Tensor]:
    """Return y [rows, length, value_heads, value_head_dim] and the final state [rows, value_heads,
    key_head_dim, value_head_dim].

    qkv [rows, length, 2 · heads · key_head_dim + value_heads · value_head_dim] holds q, k and v;
    decay [rows, length, value_heads or value_heads · key_head_dim], dt_bias alike; beta [rows,
    length, value_heads], A_log [value_heads]; state, the initial one, like the final one. `axis` is
    the context-parallel axis. Only plain torch reads `chunk`.
    """
    value_heads = beta.shape[-1]
    value_width = value_heads * value_head_dim
    key_width = (qkv.shape[-1] - value_width) // 2
    q, k, v = qkv.split([key_width, key_width, value_width], dim=-1)
    q, k = (widen(x.unflatten(-1, (-1, key_head_dim))) for x in (q, k))
    if qk_norm:
        q, k = normalize(q), normalize(k)
    rates = torch.exp(widen(A_log)).unsqueeze(-1)
    steps = F.softplus(widen(decay) + widen(dt_bias))
    return kernel_delta_rule(
        q * key_head_dim**-0.5,
        k,
        v.unflatten(-1, (value_heads, -1)),
        -rates * steps.unflatten(-1, (value_heads, -1)),
        max_beta * torch.sigmoid(widen(beta)),
        documents,
        state=state,
        axis=axis,
        chunk=chunk,
        kernel=kernel,
    )


def kernel_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    chunk: int = 64,
    kernel: DeltaKernel = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` by a fused kernel, in v's dtype, or in plain torch. fla returns no final
    state."""
    if kernel == "fla":
        refuse_fla(v, state, axis)
        spans = documents.spans() if documents is not None else Spans.of_rows(v)
        tensors = q.to(v.dtype), k.to(v.dtype), v, g.float(), beta.float()
        return delta_fla.delta_fla(*tensors, spans.ends), v.new_empty(0)
    problem = kernels.unsupported_reason(k.shape[-1], v.shape[-1])
    if uses_kernel(kernel, "delta", v, problem):
        positions = documents.positions if documents is not None else None
        y, final, *_ = kernels.delta(
            q.to(v.dtype), k.to(v.dtype), v, g, beta, state, positions, axis.name
        )
        return y, final
    y, final = delta_rule(
        widen(q), widen(k), widen(v), widen(g), widen(beta), documents,
        state=state, axis=axis, chunk=chunk,
    )  # fmt: skip
    return y.to(v.dtype), final


def refuse_fla(v: Tensor, state: Tensor | None, axis: Axis) -> None:
    """Raise LayoutError if fla cannot compute this."""
    if state is not None:
        raise LayoutError("kernel: fla has no initial state", hint="use `kernel: triton`")
    if axis.size > 1:
        raise LayoutError(
            "kernel: fla passes no states between ranks",
            hint="set layout.delta=a2a, or use `kernel: triton`",
        )
    refuse("delta_fla", v, delta_fla.missing_reason(), hint=FLA_INSTALL)


def normalize(x: Tensor) -> Tensor:
    """Return x/|x| over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
