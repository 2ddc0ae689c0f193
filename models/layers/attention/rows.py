"""Attention over rows that hold one document: torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def row_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    """Return attention like q [rows, queries, heads, head_dim], as wide as v; k, v [rows, keys,
    kv_heads, head_dim], mask [rows or 1, 1, queries, keys] or None for causal attention."""
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
