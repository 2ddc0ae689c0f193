"""Mamba-2's gated norm, RMSNorm(y · silu(z)) by groups of channels, in one pass over memory.

Its twin is GatedRMSNorm.plain in models/norms.py. z may be a slice of a wider tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

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
def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """y and z [rows, length, width]."""
    y_, z_ = _rows(y), _rows(z)
    rows, width = y_.shape
    share = width // groups
    out = torch.empty(rows, width, dtype=layout.kind(y, weight), device=y.device)
    block, tile, warps = layout.row_tiles(share)
    _programs().forward[(-(-rows // tile), groups)](
        y_, z_, weight.contiguous(), out, rows, width, share, y_.stride(0), z_.stride(0), eps,
        ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out.view(y.shape)


@gated_rms_norm.register_fake
def _(y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return y.new_empty(y.shape, dtype=layout.kind(y, weight))


@op("gated_rms_norm_backward")
def _backward(
    grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    y_, z_ = _rows(y), _rows(z)
    rows, width = y_.shape
    share = width // groups
    grad_y = torch.empty(rows, width, dtype=y.dtype, device=y.device)
    grad_z = torch.empty(rows, width, dtype=z.dtype, device=y.device)
    block, tile, warps = layout.row_tiles(share)
    tiles = -(-rows // tile)
    programs, each = layout.turns(tiles, SUMMED)
    partial = torch.empty(programs, width, dtype=torch.float32, device=y.device)
    _programs().backward[(programs, groups)](
        grad.contiguous(), y_, z_, weight.contiguous(), grad_y, grad_z, partial, rows, each,
        width, share, y_.stride(0), z_.stride(0), eps, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return grad_y.view(y.shape), grad_z.view(z.shape), partial.sum(0).to(weight.dtype)


@_backward.register_fake
def _(grad: Tensor, y: Tensor, z: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), z.new_empty(z.shape), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.eps, ctx.groups = inputs[3:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.groups), None, None)


gated_rms_norm.register_autograd(_differentiate, setup_context=_keep)
