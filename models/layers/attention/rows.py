"""Attention over rows that hold one document: torch's `scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHANNELS = 8
"""Channels added for a sink: heads stay multiples of 8, as kernels need."""


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention like q [rows, queries, heads, head_dim], as wide as v; k, v [rows, keys,
    kv_heads, head_dim], mask [rows or 1, 1, queries, keys] or None for causal attention. A head's
    softmax also counts its score in `sinks` [heads]."""
    if sinks is not None:
        width = v.shape[-1]
        q, k, v, mask = add_sink_key(q, k, v, mask, sinks / scale)
        return row_attention(q, k, v, mask, scale=scale)[..., :width]
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


def add_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, products: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put a key with the value 0 before all keys, visible to all queries, whose product with each
    query of a head is that in `products` [heads]: it stands in a channel that other keys lack."""
    new = (0, CHANNELS)
    q, k, v = (F.pad(x, new) for x in (q, k, v))
    marks = F.one_hot(torch.tensor(q.shape[-1] - CHANNELS, device=q.device), q.shape[-1])
    q = q + products.unsqueeze(-1).to(q.dtype) * marks.to(q.dtype)
    sink = marks.to(k.dtype).expand(len(k), 1, k.shape[2], -1)
    if mask is None:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
        mask = mask[None, None]
    k, v = torch.cat([sink, k], dim=1), F.pad(v, (0, 0, 0, 0, 1, 0))
    return q, k, v, F.pad(mask, (1, 0), value=True)
