"""Operators sharded by head (Ulysses): each rank has full rows for some heads.

    [rows, local_length, heads, dim]  ── all-to-all ──►  [rows, length, heads / N, dim]   and back

An all-to-all for queries, keys and values, and an all-to-all for the output: each rank sends
(N−1)/N of its tensors, in total 2·(heads + kv_heads)·dim·L/N numbers per row. With fewer kv heads
than ranks, a kv head goes to every rank whose queries share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import gather_rows, scatter_rows
from .tensor import split_group_runs


def gather_rows_of_heads(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather full rows for this rank's heads: q [rows, local_length, heads, dim] →
    [rows, length, heads/N, dim]; k and v alike, with kv_heads. The axis size must divide the query
    heads."""
    if axis.size == 1:
        return q, k, v
    heads, kv_heads = q.shape[2], k.shape[2]
    assert heads % axis.size == 0, "the layout's checks refuse heads that do not divide"
    num_local = heads // axis.size
    runs = [split_group_runs(kv_heads, heads, rank) for rank in axis.ranks()]
    num_kv = len(runs[axis.rank])
    shared = [head for run in runs for head in run]
    if shared != list(range(kv_heads)):  # several ranks share heads of keys and values
        k, v = k[:, :, shared], v[:, :, shared]
    joined = torch.cat([x.unflatten(2, (axis.size, -1)) for x in (q, k, v)], dim=3).flatten(2, 3)
    counts = [num_local + 2 * num_kv] * axis.size
    q, k, v = gather_rows(joined, counts, axis).split([num_local, num_kv, num_kv], dim=2)
    return q, k, v


def gather_rows_of_states(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    axis: Axis,
    *,
    key_head_dim: int,
    value_head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather full rows for this rank's states of the delta rule: qkv [rows, local_length, channels
    of q, k and v], decay and beta [rows, local_length, channels] → [rows, length, …]. The axis size
    must divide the states; if it does not divide the heads of keys, each state gets its own."""
    states = beta.shape[-1]
    assert states % axis.size == 0, "the layout's checks refuse heads that do not divide"
    value_width = states * value_head_dim
    key_width = (qkv.shape[-1] - value_width) // 2
    q, k, v = qkv.split([key_width, key_width, value_width], dim=-1)
    q, k = (x.unflatten(-1, (-1, key_head_dim)) for x in (q, k))
    heads = q.shape[2]
    if heads % axis.size:
        q, k = (x.repeat_interleave(states // heads, dim=2) for x in (q, k))
        heads = states
    tensors = [q, k, *(x.unflatten(-1, (heads, -1)) for x in (v, decay, beta))]
    joined = gather_rows(torch.cat(tensors, dim=-1), [heads // axis.size] * axis.size, axis)
    q, k, v, decay, beta = (
        x.flatten(2) for x in joined.split([x.shape[-1] for x in tensors], dim=-1)
    )
    return torch.cat([q, k, v], dim=-1), decay, beta


def scatter_rows_of_heads(y: Tensor, axis: Axis) -> Tensor:
    """Scatter rows, and gather heads: y [rows, length, heads/N, dim] →
    [rows, local_length, heads, dim]."""
    return scatter_rows(y, [y.shape[2]] * axis.size, axis)
