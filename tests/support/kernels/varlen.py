"""Emulations of torch's `varlen_attn`, which needs a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def emulated(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute what `varlen_attn` promises: one document at a time, one query at a time."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return by_definition(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size)


def of_torch_2_11(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """The same without grouped queries."""
    assert q.shape[1] == k.shape[1]
    return by_definition(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    left, right = window_size
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and right == 0
    assert min(max_q, max_k) >= int(cu_q.diff().max())
    rows = []
    for begin, end in torch.stack([cu_q[:-1], cu_q[1:]], dim=1).tolist():
        for t in range(begin, end):
            first = begin if left < 0 else max(begin, t - left)
            heads = []
            for head in range(q.shape[1]):
                group = head * k.shape[1] // q.shape[1]
                weight = (k[first : t + 1, group] @ q[t, head] * scale).softmax(0)
                heads.append(weight @ v[first : t + 1, group])
            rows.append(torch.stack(heads))
    return torch.stack(rows)
