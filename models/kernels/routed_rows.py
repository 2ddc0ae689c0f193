"""Tokens to the rows of their experts, and back, in one pass over memory each; the twins are in
models/layers/routed_rows.py.

A program takes a token and all its rows. No row has two tokens: nothing is sorted, and no sum needs
atomics.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import layout
from .launch import Programs
from .op import op


@cache
def _programs() -> Any:
    from .programs import routed_rows

    return Programs(routed_rows)


@op("spread_rows")
def dispatch_rows(x: Tensor, row_ids: Tensor) -> Tensor:
    """Return rows [tokens · k, width] with rows[row_ids[t, j]] = x[t], for x [tokens, width] and
    row_ids int64 [tokens, k], a permutation of all rows."""
    return _launch_dispatch(x, row_ids, None, None)[0]


@dispatch_rows.register_fake
def _(x: Tensor, row_ids: Tensor) -> Tensor:
    return x.new_empty(row_ids.numel(), x.shape[1])


@op("collect_rows")
def combine_rows(rows: Tensor, row_ids: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_j weights[t, j] · rows[row_ids[t, j]], [tokens, width], for rows [tokens · k, width]
    and weights [tokens, k]."""
    return _launch_combine(rows, row_ids, weights)


@combine_rows.register_fake
def _(rows: Tensor, row_ids: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(len(row_ids), rows.shape[1])


@op("spread_rows_backward")
def _dispatch_backward(grad: Tensor, row_ids: Tensor) -> Tensor:
    """Return the gradient of x [tokens, width]: the sum over its rows."""
    return _launch_combine(grad, row_ids, None)


@_dispatch_backward.register_fake
def _(grad: Tensor, row_ids: Tensor) -> Tensor:
    return grad.new_empty(len(row_ids), grad.shape[1])


@op("collect_rows_backward")
def _combine_backward(
    grad: Tensor, rows: Tensor, row_ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows [tokens · k, width] and weights [tokens, k]."""
    return _launch_dispatch(grad, row_ids, weights, rows)


@_combine_backward.register_fake
def _(grad: Tensor, rows: Tensor, row_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _launch_dispatch(
    x: Tensor, row_ids: Tensor, weights: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, row_ids = x.contiguous(), row_ids.contiguous()
    out = x.new_empty(row_ids.numel(), x.shape[1])
    weighted = weights is not None and rows is not None
    weights, rows = (x if tensor is None else tensor.contiguous() for tensor in (weights, rows))
    grad_weights = torch.empty_like(weights) if weighted else x
    block, tokens_per_program, warps = layout.row_tile_sizes(x.shape[1])
    _programs().routed_rows_dispatch[(-(-len(x) // tokens_per_program),)](
        x, rows, weights, row_ids, out, grad_weights, *x.shape, K=row_ids.shape[1],
        WEIGHTED=weighted, ROWS=tokens_per_program, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out, grad_weights


def _launch_combine(rows: Tensor, row_ids: Tensor, weights: Tensor | None) -> Tensor:
    rows, row_ids = rows.contiguous(), row_ids.contiguous()
    out = rows.new_empty(len(row_ids), rows.shape[1])
    block, tokens_per_program, warps = layout.row_tile_sizes(rows.shape[1])
    _programs().routed_rows_combine[(-(-len(row_ids) // tokens_per_program),)](
        rows, rows if weights is None else weights.contiguous(), row_ids, out, *out.shape,
        K=row_ids.shape[1], WEIGHTED=weights is not None, ROWS=tokens_per_program, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return out


def _setup_dispatch_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _autograd_dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _dispatch_backward(grad, *ctx.saved_tensors), None


def _setup_combine_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd_combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    grad_rows, grad_weights = _combine_backward(grad, *ctx.saved_tensors)
    return grad_rows, None, grad_weights


dispatch_rows.register_autograd(_autograd_dispatch_backward, setup_context=_setup_dispatch_context)
combine_rows.register_autograd(_autograd_combine_backward, setup_context=_setup_combine_context)
