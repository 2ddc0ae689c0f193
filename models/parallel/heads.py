"""Attention by heads (Ulysses): each process has whole rows of some of the heads.

    [rows, part, heads, dim]  ── all-to-all ──►  [rows, length, heads / N, dim]   and back

One exchange brings queries, keys and values, one takes the output back: each process sends
(N−1)/N of what it has, 2·(heads + kv_heads)·dim·L/N numbers of a row in all. Where there are fewer
heads of keys and values than processes, they go to all whose queries share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .axes import Axis
from .exchange import own_parts, whole_rows
from .tensor import group_runs


def to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Our heads of whole rows; heads of queries must be a multiple of the processes."""
    if axis.size == 1:
        return q, k, v
    heads, kv_heads = q.shape[2], k.shape[2]
    assert heads % axis.size == 0, "layouts whose heads do not divide are refused beforehand"
    runs = [group_runs(kv_heads, heads, rank) for rank in axis.ranks()]
    pieces = [
        torch.cat([q[:, :, rank.part(heads)], k[:, :, shared], v[:, :, shared]], dim=2)
        for rank, shared in zip(axis.ranks(), runs, strict=True)
    ]
    few = len(runs[axis.rank])
    q, k, v = whole_rows(pieces, axis).split([heads // axis.size, few, few], dim=2)
    return q, k, v


def from_heads(y: Tensor, axis: Axis) -> Tensor:
    """All heads of our part."""
    return own_parts(y, [y.shape[2]] * axis.size, axis)
