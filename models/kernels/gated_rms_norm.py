"""Mamba-2's gated norm, RMSNorm(y · silu(z)) by channel groups, in one pass over memory.

Where several ranks share a group, a first pass computes each rank's contribution to the group's
sums, and the op exchanges these: one number for each token, two in the backward pass.

The twin is GatedRMSNorm.plain in models/layers/norms.py. z may be a slice of a wider tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.groups import find_axis
from ..parallel.tensor import split_group_runs, sum_groups
from . import fp8, layout
from .launch import Launch, Programs, keep_bound
from .op import op
from .rms_norm import MAX_GRAD_PROGRAMS


@cache
def _programs() -> Programs:
    from .programs import gated_rms_norm

    return Programs(gated_rms_norm)


def _flatten_rows(x: Tensor) -> Tensor:
    """Return x as [rows · length, width], without a copy if a token's channels are adjacent."""
    return layout.to_channels_last(x).flatten(0, -2)


@op("gated_rms_norm")
def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, axis: str
) -> Tensor:
    """Return RMSNorm(y · silu(z)) by channel groups. y, z and the result [rows, length, width],
    weight [width]. `axis` names the tensor axis that shards every group's channels, or is empty."""
    return _forward(y, z, weight, eps, groups, axis)


@gated_rms_norm.register_fake
def _(y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape, dtype=layout.promote_dtypes(y, weight))


@op("gated_rms_norm_fp8")
def gated_rms_norm_fp8(
    y: Tensor, z: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `gated_rms_norm` with one group [rows, length, width], and its values and scales
    [rows, length, 1] in FP8."""
    stored = fp8.empty_quantized(y)
    return _forward(y, z, weight, eps, 1, "", stored), *stored


@gated_rms_norm_fp8.register_fake
def _(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape, dtype=layout.promote_dtypes(y, weight)), *fp8.empty_quantized(y)


def _forward(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    axis: str,
    stored: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the norm; `stored` receives its values and scales in FP8."""
    y_rows, z_rows, weight = _flatten_rows(y), _flatten_rows(z), weight.contiguous()
    num_rows, width = y_rows.shape
    num_runs, group_width, groups_are_cut = _split_runs(width, groups, axis)
    run_width = width // num_runs
    out = torch.empty(num_rows, width, dtype=layout.promote_dtypes(y, weight), device=y.device)
    square_sums = (
        _sum_groups(None, y_rows, z_rows, weight, num_runs, groups, axis)[0]
        if groups_are_cut
        else y_rows
    )
    sizes = (num_rows, width, run_width, group_width, y_rows.stride(0), z_rows.stride(0), eps)
    _bind_forward(sizes, num_runs, groups_are_cut, stored is not None)(
        y_rows, z_rows, weight, square_sums, out, *(stored or (out, out))
    )
    return out.view(y.shape)


@keep_bound
def _bind_forward(
    sizes: tuple[Any, ...], num_runs: int, groups_are_cut: bool, stores: bool
) -> Launch:
    num_rows, _, run_width, *_ = sizes
    block, rows_per_program, warps = layout.row_tile_sizes(run_width)
    return _programs().bind(
        "gated_rms_norm_forward", (-(-num_rows // rows_per_program), num_runs), *sizes,
        CUT=groups_are_cut, FP8=stores, ROWS=rows_per_program, BLOCK=block, num_warps=warps,
    )  # fmt: skip


@op("gated_rms_norm_backward")
def _backward(
    dy: Tensor, y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    dy, y_rows, z_rows, weight = (
        dy.contiguous(),
        _flatten_rows(y),
        _flatten_rows(z),
        weight.contiguous(),
    )
    num_rows, width = y_rows.shape
    num_runs, group_width, groups_are_cut = _split_runs(width, groups, axis)
    run_width = width // num_runs
    square_sums, product_sums = (
        _sum_groups(dy, y_rows, z_rows, weight, num_runs, groups, axis)
        if groups_are_cut
        else (y_rows, y_rows)
    )
    grad_y = y.new_empty(num_rows, width)
    grad_z = z.new_empty(num_rows, width)
    block, rows_per_program, warps = layout.row_tile_sizes(run_width)
    num_tiles = -(-num_rows // rows_per_program)
    num_programs, tiles_per_program = layout.share_tiles(num_tiles, MAX_GRAD_PROGRAMS)
    weight_grads = y.new_empty(num_programs, width, dtype=torch.float32)
    sizes = (
        num_rows, tiles_per_program, width, run_width, group_width, y_rows.stride(0),
        z_rows.stride(0), eps,
    )  # fmt: skip
    options = layout.row_loop_options("gated_rms_norm", warps)
    _bind_backward(
        sizes, (num_programs, num_runs), groups_are_cut, ROWS=rows_per_program, BLOCK=block,
        **options,
    )(
        dy, y_rows, z_rows, weight, square_sums, product_sums, grad_y, grad_z, weight_grads
    )  # fmt: skip
    return grad_y.view(y.shape), grad_z.view(z.shape), weight_grads.sum(0).to(weight.dtype)


@keep_bound
def _bind_backward(
    sizes: tuple[Any, ...], grid: tuple[int, int], groups_are_cut: bool, **constants: int
) -> Launch:
    return _programs().bind(
        "gated_rms_norm_backward", grid, *sizes, CUT=groups_are_cut, **constants
    )


@_backward.register_fake
def _(grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), z.new_empty(z.shape), torch.empty_like(weight)


def _split_runs(width: int, groups: int, axis: str) -> tuple[int, int, bool]:
    """Return num_runs, group_width, groups_are_cut: this rank's channels form runs of equal length,
    each within one group; ranks may share groups."""
    ranks = find_axis(axis)
    if ranks.size == 1:
        return groups, width // groups, False
    total_width = width * ranks.size
    num_runs = len(split_group_runs(groups, total_width, ranks))
    return num_runs, total_width // groups, groups % ranks.size != 0


def _sum_groups(
    dy: Tensor | None, y: Tensor, z: Tensor, weight: Tensor, num_runs: int, groups: int, axis: str
) -> Tensor:
    """Return fp32 [1 or 2, rows, runs]: Σ v² over each run's whole group and, with dy, Σ
    dy·weight·v."""
    ranks, (num_rows, width) = find_axis(axis), y.shape
    sums = y.new_empty(1 if dy is None else 2, num_rows, num_runs, dtype=torch.float32)
    block, rows_per_program, warps = layout.row_tile_sizes(width // num_runs)
    _programs().gated_rms_norm_sums[(-(-num_rows // rows_per_program), num_runs)](
        y if dy is None else dy, y, z, weight, sums, num_rows, width, width // num_runs,
        y.stride(0), z.stride(0), BACKWARD=dy is not None, ROWS=rows_per_program, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return sum_groups(sums, groups, width * ranks.size, ranks)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(dy, *ctx.saved_tensors, *ctx.options), None, None, None)


def _setup_fp8_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*output[1:])


def _autograd_fp8_backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_backward(dy, *ctx.saved_tensors, ctx.eps, 1, ""), None


gated_rms_norm.register_autograd(_autograd_backward, setup_context=_setup_context)
gated_rms_norm_fp8.register_autograd(_autograd_fp8_backward, setup_context=_setup_fp8_context)
