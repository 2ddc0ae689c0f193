"""Attention by heads (Ulysses): each process has whole rows of some of the heads.

    [rows, part, heads, dim]  ── all-to-all ──►  [rows, length, heads / N, dim]   and back

One exchange brings queries, keys and values, one takes the output back: each process sends
(N−1)/N of what it has, 2·(heads + kv_heads)·dim·L/N numbers of a row in all. Where there are fewer
heads of keys and values than processes, they go to all whose queries share them.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from .axes import Axis
from .exchange import own_parts, share, whole_rows


def to_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Our heads of whole rows; heads of queries must be a multiple of the processes."""
    if axis.size == 1:
        return q, k, v
    heads, kv_heads = q.shape[2], k.shape[2]
    assert heads % axis.size == 0, "layouts whose heads do not divide are refused beforehand"
    # As many of our queries' heads as can be, one after the other, share keys and values.
    together = gcd(heads // axis.size, heads // kv_heads)
    pieces = []
    for rank in range(axis.size):
        mine = share(heads, axis, rank)
        shared = [head * kv_heads // heads for head in range(mine.start, mine.stop, together)]
        pieces.append(torch.cat([q[:, :, mine], k[:, :, shared], v[:, :, shared]], dim=2))
    ours = whole_rows(pieces, axis)
    few = len(shared)
    return tuple(ours.split([heads // axis.size, few, few], dim=2))


def from_heads(y: Tensor, axis: Axis) -> Tensor:
    """All heads of our part."""
    return own_parts(y, [y.shape[2]] * axis.size, axis)
