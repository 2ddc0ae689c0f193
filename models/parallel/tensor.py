"""Tensor-parallel communication, forward and backward.

Between operators a rank has a slice of every sequence (sequence parallelism). Inside an operator it
has full sequences and some heads or channels:

    u [rows, L/N, D] ─ norm ─ gather ─► x [rows, L, D] ─ operator ─► partial ─ scatter ─► + u

The objective is the *sum* over the ranks' losses, and every function here is differentiated
accordingly. So a sharded parameter's gradient is complete on its rank, and a replicated parameter's
gradient is partial, to be summed over the axis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .axes import Axis
from .collectives import all_gather, all_reduce, reduce_scatter


def gather(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Concatenate all ranks' slices along `dim`."""
    if axis.size == 1:
        return x
    gathered: Tensor = _Gather.apply(x, axis, dim)
    return gathered


def scatter(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Sum x over all ranks, and return this rank's slice along `dim`."""
    if axis.size == 1:
        return x
    local: Tensor = _Scatter.apply(x, axis, dim)
    return local


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum x over all ranks."""
    if axis.size == 1:
        return x
    total: Tensor = _Reduce.apply(x, axis)
    return total


def reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise maximum over all ranks; not differentiable."""
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


# Members of a group share a tensor: query heads a kv head, heads B and C, channels a filter


def select_local_groups(x: Tensor, groups: int, members: int, axis: Axis) -> Tensor:
    """Select the groups for this rank's members: x [..., groups · channels / ranks] →
    [..., local_groups, channels].

    If the axis size does not divide the groups, a rank holds a fraction of a group. Then all groups
    are gathered, and each rank selects its members' groups, once per run of members.
    """
    if groups % axis.size == 0:
        local: Tensor = x.unflatten(-1, (groups // axis.size, -1))
        return local
    all_groups: Tensor = gather(x, axis, dim=-1).unflatten(-1, (groups, -1))
    return all_groups.index_select(-2, _run_groups(groups, members, axis, x.device))


def select_local_filters(filters: Tensor, groups: int, members: int, axis: Axis) -> Tensor:
    """Select the filters for this rank's members, from filters [groups, …], each shared by equally
    many adjacent members.

    If the axis size does not divide the groups, every rank has all filters.
    """
    if groups % axis.size == 0:
        return filters
    return filters.index_select(0, _run_groups(groups, members, axis, filters.device))


def split_group_runs(groups: int, members: int, axis: Axis) -> list[int]:
    """Split this rank's members into equal runs, as long as possible, that do not cross groups.
    Return the runs' groups."""
    local_members = axis.part_range(members)
    run_length = math.gcd(members // groups, len(local_members))
    return [member * groups // members for member in local_members[::run_length]]


def sum_groups(sums: Tensor, groups: int, members: int, axis: Axis) -> Tensor:
    """Complete sums over groups: sums [..., runs] over this rank's members → over full groups."""
    if groups % axis.size == 0:
        return sums
    group = _run_groups(groups, members, axis, sums.device)
    group_sums = sums.new_zeros(*sums.shape[:-1], groups).index_add(-1, group, sums)
    return reduce(group_sums, axis).index_select(-1, group)


def _run_groups(groups: int, members: int, axis: Axis, device: torch.device) -> Tensor:
    return torch.tensor(split_group_runs(groups, members, axis), device=device)
