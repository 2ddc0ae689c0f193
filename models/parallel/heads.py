"""Attention by heads (Ulysses): each rank has whole rows of some of the heads.

    [rows, part, heads, dim]  ── all-to-all ──►  [rows, length, heads / N, dim]   and back

One exchange brings queries, keys and values, one takes the output back: each rank sends (N−1)/N
of its tensors, 2·(heads + kv_heads)·dim·L/N numbers of a row in total. If there are fewer heads of
keys and values than ranks, they go to every rank whose queries share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import own_parts, whole_rows
from .tensor import group_runs


def to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of whole rows. The axis size must divide the heads of queries."""
    if axis.size == 1:
        return q, k, v
    heads, kv_heads = q.shape[2], k.shape[2]
    assert heads % axis.size == 0, "the layout's checks refuse heads that do not divide"
    own = heads // axis.size
    runs = [group_runs(kv_heads, heads, rank) for rank in axis.ranks()]
    few = len(runs[axis.rank])
    shared = [head for run in runs for head in run]
    if shared != list(range(kv_heads)):  # several ranks share heads of keys and values
        k, v = k[:, :, shared], v[:, :, shared]
    joined = torch.cat([x.unflatten(2, (axis.size, -1)) for x in (q, k, v)], dim=3).flatten(2, 3)
    counts = [own + 2 * few] * axis.size
    q, k, v = whole_rows(joined, counts, axis).split([own, few, few], dim=2)
    return q, k, v


def from_heads(y: Tensor, axis: Axis) -> Tensor:
    """All heads of this rank's part of the rows."""
    return own_parts(y, [y.shape[2]] * axis.size, axis)
