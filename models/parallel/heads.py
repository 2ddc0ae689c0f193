"""Attention sharded by head (Ulysses): each rank has full rows for some heads.

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


def scatter_rows_of_heads(y: Tensor, axis: Axis) -> Tensor:
    """Scatter rows, and gather heads: y [rows, length, heads/N, dim] →
    [rows, local_length, heads, dim]."""
    return scatter_rows(y, [y.shape[2]] * axis.size, axis)
