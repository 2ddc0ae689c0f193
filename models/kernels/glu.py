"""act(gate) ⊙ up in one pass over memory; the twin is in models/operators/mlp.py.

Gate and up are the halves of one tensor, as the projection writes them, and so are their gradients:
nothing is split or concatenated.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import fp8, layout
from .launch import Launch, Programs, keep_bound
from .op import op

ROWS, BLOCK = 2, 1024
"""Tile size: 128 threads with 16 numbers each."""


@cache
def _programs() -> Programs:
    from .programs import glu

    return Programs(glu)


@op("glu")
def glu(x: Tensor, activation: str, limit: float = 0.0, offset: float = 0.0) -> Tensor:
    """Return act(gate) ⊙ (up + offset) [..., width] for x [..., 2·width] = [gate, up], clamped by
    `limit` as in `apply_gate`; 0: not clamped."""
    rows, width, grid = _flatten_rows(x)
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    sizes = (len(rows), width, rows.stride(0))
    _bind("glu_forward", grid, sizes, activation, limit, offset)(rows, out)
    return out


@glu.register_fake
def _(x: Tensor, activation: str, limit: float = 0.0, offset: float = 0.0) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@op("glu_fp8")
def glu_fp8(x: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return act(gate) ⊙ up [..., width], and the same in FP8: values [..., width] and scales
    [..., 1]. A program takes whole rows, because a row has one scale."""
    rows, width, _ = _flatten_rows(x)
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    values, scales = fp8.empty_quantized(out)
    block, rows_per_program, warps = layout.row_tile_sizes(width)
    _programs().glu_forward_fp8[(-(-len(rows) // rows_per_program),)](
        rows, out, values, scales, len(rows), width, rows.stride(0), ACTIVATION=activation,
        ROWS=rows_per_program, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out, values, scales


@glu_fp8.register_fake
def _(x: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return out, *fp8.empty_quantized(out)


@op("glu_backward")
def _backward(dy: Tensor, x: Tensor, activation: str, limit: float, offset: float) -> Tensor:
    """Return the gradient of x [..., 2·width]."""
    rows, width, grid = _flatten_rows(x)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = (len(rows), width, rows.stride(0))
    launch = _bind("glu_backward", grid, sizes, activation, limit, offset)
    launch(dy.contiguous(), rows, grad_x)
    return grad_x


@_backward.register_fake
def _(grad: Tensor, x: Tensor, activation: str, limit: float, offset: float) -> Tensor:
    return x.new_empty(x.shape)


@keep_bound
def _bind(
    program: str,
    grid: tuple[int],
    sizes: tuple[int, int, int],
    activation: str,
    limit: float,
    offset: float,
) -> Launch:
    return _programs().bind(
        program, grid, *sizes, ACTIVATION=activation, LIMIT=limit, OFFSET=offset, ROWS=ROWS,
        BLOCK=BLOCK,
    )  # fmt: skip


def _flatten_rows(x: Tensor) -> tuple[Tensor, int, tuple[int]]:
    """Return x as rows [n, 2·width], the width of a half, and the grid of programs: one for each
    tile of ROWS × BLOCK."""
    rows = layout.to_channels_last(x).flatten(0, -2)
    width = x.shape[-1] // 2
    return rows, width, (-(-len(rows) // ROWS) * -(-width // BLOCK),)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *ctx.options = inputs
    ctx.save_for_backward(x)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])


def _autograd_backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    activation, *clamps = ctx.options
    limit, offset = clamps or (0.0, 0.0)
    grad_x = _backward(dy, *ctx.saved_tensors, activation, limit, offset)
    return grad_x, *(None for _ in ctx.options)


glu.register_autograd(_autograd_backward, setup_context=_setup_context)
glu_fp8.register_autograd(_autograd_backward, setup_context=_setup_context)
