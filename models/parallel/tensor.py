"""Communication of tensor parallelism, forward and backward.

Between operators a rank has a part of every sequence (sequence parallelism); inside an operator,
whole sequences and a part of the heads or channels:

    u [rows, L/N, D] ─ norm ─ gather ─► x [rows, L, D] ─ operator ─► partial ─ scatter ─► + u

One rule makes all gradients right: the objective is the *sum* of the ranks' losses, and each
function here is differentiated as such. The gradient of a sharded parameter is then complete on
its rank; the gradient of a replicated parameter is a partial sum, to be summed over the axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .axes import Axis
from .collectives import all_gather, all_reduce, reduce_scatter


def gather(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Concatenate the parts of all ranks along `dim`."""
    if axis.size == 1:
        return x
    whole: Tensor = _Gather.apply(x, axis, dim)
    return whole


def scatter(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Sum over all ranks; return this rank's part along `dim`."""
    if axis.size == 1:
        return x
    part: Tensor = _Scatter.apply(x, axis, dim)
    return part


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over all ranks."""
    if axis.size == 1:
        return x
    total: Tensor = _Reduce.apply(x, axis)
    return total


def highest(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over all ranks; not differentiable."""
    return all_reduce(x, axis, "max") if axis.size > 1 else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grad, ctx.axis, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.axis, ctx.dim), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.axis), None


def _gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    dim %= x.dim()
    return all_gather(x, axis).movedim(0, dim).flatten(dim, dim + 1)


def _scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    dim %= x.dim()
    return reduce_scatter(x.unflatten(dim, (axis.size, -1)).movedim(dim, 0), axis)


# Groups whose members share something: heads of keys, groups of B and C, filters of channels


def own_groups(x: Tensor, groups: int, members: int, axis: Axis) -> Tensor:
    """x [..., channels of all groups], sharded evenly → [..., groups, channels of a group]: the
    groups of this rank's members.

    If the axis size does not divide the groups, a rank holds a fraction of a group: then all
    groups are gathered, and each rank takes those of its members, once for each run of members.
    """
    if groups % axis.size == 0:
        own: Tensor = x.unflatten(-1, (groups // axis.size, -1))
        return own
    every: Tensor = gather(x, axis, dim=-1).unflatten(-1, (groups, -1))
    return every.index_select(-2, _runs(groups, members, axis, x.device))


def own_filters(filters: Tensor, groups: int, members: int, axis: Axis) -> Tensor:
    """filters [groups, …], each shared by equally many neighbouring members → the filters of this
    rank's members.

    If the axis size does not divide the groups, every rank has all filters.
    """
    if groups % axis.size == 0:
        return filters
    return filters.index_select(0, _runs(groups, members, axis, filters.device))


def group_runs(groups: int, members: int, axis: Axis) -> list[int]:
    """Split this rank's members into equal runs, as long as possible, each inside one group.
    Return the group of each run."""
    own = axis.part_range(members)
    run = math.gcd(members // groups, len(own))
    return [first * groups // members for first in own[::run]]


def sums_of_groups(sums: Tensor, groups: int, members: int, axis: Axis) -> Tensor:
    """sums [..., runs] over this rank's members → sums over whole groups, for each run."""
    if groups % axis.size == 0:
        return sums
    group = _runs(groups, members, axis, sums.device)
    every = sums.new_zeros(*sums.shape[:-1], groups).index_add(-1, group, sums)
    return reduce(every, axis).index_select(-1, group)


def _runs(groups: int, members: int, axis: Axis, device: torch.device) -> Tensor:
    return torch.tensor(group_runs(groups, members, axis), device=device)
