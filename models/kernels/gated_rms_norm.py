"""Mamba-2's gated norm, RMSNorm(y · silu(z)) by groups of channels, in one pass over memory.

Where processes have parts of a group, a pass before finds what each adds to the group's sums, and
these cross inside the op: a number for each token, and backward two.

Its twin is GatedRMSNorm.plain in models/norms.py. z may be a slice of a wider tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.axes import named
from ..parallel.tensor import group_runs, sums_of_groups
from . import layout
from .op import op
from .rms_norm import SUMMED


@cache
def _programs() -> Any:
    from .programs import gated_rms_norm

    return gated_rms_norm


def _rows(x: Tensor) -> Tensor:
    """[rows · length, width], as it lies where a token's channels are side by side."""
    return layout.by_token(x).flatten(0, -2)


@op("gated_rms_norm")
def gated_rms_norm(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, axis: str
) -> Tensor:
    """y and z [rows, length, width]. `axis` is the name of the one that divides the channels of
    all groups, if one does."""
    y_, z_, weight = _rows(y), _rows(z), weight.contiguous()
    rows, width = y_.shape
    runs, members, cut = _runs(width, groups, axis)
    share = width // runs
    out = torch.empty(rows, width, dtype=layout.kind(y, weight), device=y.device)
    powers = _sums(None, y_, z_, weight, runs, groups, axis)[0] if cut else y_
    block, tile, warps = layout.row_tiles(share)
    _programs().forward[(-(-rows // tile), runs)](
        y_, z_, weight, powers, out, rows, width, share, members, y_.stride(0), z_.stride(0), eps,
        CUT=cut, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out.view(y.shape)


@gated_rms_norm.register_fake
def _(y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape, dtype=layout.kind(y, weight))


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
    block, tile, warps = layout.row_tiles(share)
    tiles = -(-rows // tile)
    programs, each = layout.turns(tiles, SUMMED)
    partial = torch.empty(programs, width, dtype=torch.float32, device=y.device)
    _programs().backward[(programs, runs)](
        grad, y_, z_, weight, powers, pulls, grad_y, grad_z, partial, rows, each, width, share,
        members, y_.stride(0), z_.stride(0), eps, CUT=cut, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return grad_y.view(y.shape), grad_z.view(z.shape), partial.sum(0).to(weight.dtype)


@_backward.register_fake
def _(grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), z.new_empty(z.shape), torch.empty_like(weight)


def _runs(width: int, groups: int, axis: str) -> tuple[int, int, bool]:
    """Into how many runs of equal length, each of one group, these channels fall; how many
    channels a whole group has; and whether processes cut groups."""
    processes = named(axis)
    channels = width * processes.size
    runs = len(group_runs(groups, channels, processes))
    return runs, channels // groups, groups % processes.size != 0


def _sums(
    grad: Tensor | None, y: Tensor, z: Tensor, weight: Tensor, runs: int, groups: int, axis: str
) -> Tensor:
    """fp32 [1 or 2, rows, runs]: what the whole group of each run has in squares and, where there
    is a gradient, in products of it with what is normed."""
    processes, (rows, width) = named(axis), y.shape
    found = y.new_empty(1 if grad is None else 2, rows, runs, dtype=torch.float32)
    block, tile, warps = layout.row_tiles(width // runs)
    _programs().sums[(-(-rows // tile), runs)](
        y if grad is None else grad, y, z, weight, found, rows, width, width // runs,
        y.stride(0), z.stride(0), BACKWARD=grad is not None, ROWS=tile, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return sums_of_groups(found, groups, width * processes.size, processes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.switches = inputs[3:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.switches), None, None, None)


gated_rms_norm.register_autograd(_differentiate, setup_context=_keep)
