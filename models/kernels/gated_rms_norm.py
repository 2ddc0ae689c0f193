"""Mamba-2's gated norm, RMSNorm(y · silu(z)) by groups of channels, in one pass over memory.

Where several ranks share a group, a first pass computes each rank's contribution to the group's
sums, and the op exchanges these: one number for each token, two in the backward pass.

The twin is GatedRMSNorm.plain in models/layers/norms.py. z may be a slice of a wider tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.groups import named
from ..parallel.tensor import group_runs, sums_of_groups
from . import fp8, layout
from .op import op
from .rms_norm import SUMMED


@cache
def _programs() -> Any:
    from .programs import gated_rms_norm

    return gated_rms_norm


def _rows(x: Tensor) -> Tensor:
    """Return x as [rows · length, width], without a copy if a token's channels are adjacent."""
    return layout.to_channels_last(x).flatten(0, -2)


@op("gated_rms_norm")
def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, axis: str
) -> Tensor:
    """Norm y · silu(z), both [rows, length, width]. `axis` names the tensor axis that shards the
    channels of all groups, or is empty."""
    return _forward(y, z, weight, eps, groups, axis)


@gated_rms_norm.register_fake
def _(y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape, dtype=layout.promote_dtypes(y, weight))


@op("gated_rms_norm_fp8")
def gated_rms_norm_fp8(
    y: Tensor, z: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `gated_rms_norm` of whole rows, and its values and scales in FP8."""
    stored = fp8.empty(y)
    return _forward(y, z, weight, eps, 1, "", stored), *stored


@gated_rms_norm_fp8.register_fake
def _(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape, dtype=layout.promote_dtypes(y, weight)), *fp8.empty(y)


def _forward(
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    axis: str,
    stored: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`stored` takes the values and scales of the result in FP8."""
    y_, z_, weight = _rows(y), _rows(z), weight.contiguous()
    rows, width = y_.shape
    runs, members, cut = _runs(width, groups, axis)
    share = width // runs
    out = torch.empty(rows, width, dtype=layout.promote_dtypes(y, weight), device=y.device)
    powers = _sums(None, y_, z_, weight, runs, groups, axis)[0] if cut else y_
    block, tile, warps = layout.row_tile_sizes(share)
    _programs().gated_rms_norm_forward[(-(-rows // tile), runs)](
        y_, z_, weight, powers, out, *(stored or (out, out)), rows, width, share, members,
        y_.stride(0), z_.stride(0), eps,
        CUT=cut, FP8=stored is not None, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out.view(y.shape)


@op("gated_rms_norm_backward")
def _backward(
    grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, axis: str
) -> tuple[Tensor, Tensor, Tensor]:
    grad, y_, z_, weight = grad.contiguous(), _rows(y), _rows(z), weight.contiguous()
    rows, width = y_.shape
    runs, members, cut = _runs(width, groups, axis)
    share = width // runs
    powers, pulls = _sums(grad, y_, z_, weight, runs, groups, axis) if cut else (y_, y_)
    grad_y = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    grad_z = torch.empty(rows, width, dtype=z.dtype, device=y.device)
    block, tile, warps = layout.row_tile_sizes(share)
    tiles = -(-rows // tile)
    programs, each = layout.share_tiles(tiles, SUMMED)
    partial = torch.empty(programs, width, dtype=torch.float32, device=y.device)
    _programs().gated_rms_norm_backward[(programs, runs)](
        grad, y_, z_, weight, powers, pulls, grad_y, grad_z, partial, rows, each, width, share,
        members, y_.stride(0), z_.stride(0), eps, CUT=cut, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return grad_y.view(y.shape), grad_z.view(z.shape), partial.sum(0).to(weight.dtype)


@_backward.register_fake
def _(grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), z.new_empty(z.shape), torch.empty_like(weight)


def _runs(width: int, groups: int, axis: str) -> tuple[int, int, bool]:
    """Return the number of runs of equal length, each within one group, that this rank's channels
    form; the channels of a whole group; and True if ranks share groups."""
    ranks = named(axis)
    channels = width * ranks.size
    runs = len(group_runs(groups, channels, ranks))
    return runs, channels // groups, groups % ranks.size != 0


def _sums(
    grad: Tensor | None, y: Tensor, z: Tensor, weight: Tensor, runs: int, groups: int, axis: str
) -> Tensor:
    """Return fp32 [1 or 2, rows, runs]: the sum of squares over the whole group of each run and,
    given a gradient, the sum of its products with the normed input."""
    ranks, (rows, width) = named(axis), y.shape
    sums = y.new_empty(1 if grad is None else 2, rows, runs, dtype=torch.float32)
    block, tile, warps = layout.row_tile_sizes(width // runs)
    _programs().gated_rms_norm_sums[(-(-rows // tile), runs)](
        y if grad is None else grad, y, z, weight, sums, rows, width, width // runs,
        y.stride(0), z.stride(0), BACKWARD=grad is not None, ROWS=tile, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return sums_of_groups(sums, groups, width * ranks.size, ranks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.switches = inputs[3:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.switches), None, None, None)


def _keep_stored(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *kept, ctx.eps = inputs
    ctx.save_for_backward(*kept)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_stored(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.eps, 1, ""), None


gated_rms_norm.register_autograd(_differentiate, setup_context=_keep)
gated_rms_norm_fp8.register_autograd(_differentiate_stored, setup_context=_keep_stored)
