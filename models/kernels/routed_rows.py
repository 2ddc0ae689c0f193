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
from .op import op


@cache
def _programs() -> Any:
    from .programs import routed_rows

    return routed_rows


@op("spread_rows")
def spread_rows(x: Tensor, places: Tensor) -> Tensor:
    """Return rows with rows[places[t, j]] = x[t], for x [tokens, width] and places int64
    [tokens, k], which name each row once."""
    return _spread(x, places, None, None)[0]


@spread_rows.register_fake
def _(x: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(places.numel(), x.shape[1])


@op("collect_rows")
def collect_rows(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_j weights[t, j] · rows[places[t, j]], [tokens, width]."""
    return _collect(rows, places, weights)


@collect_rows.register_fake
def _(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(len(places), rows.shape[1])


@op("spread_rows_backward")
def _of_spread(grad: Tensor, places: Tensor) -> Tensor:
    """Return the gradient of x: the sum of the gradients of its rows."""
    return _collect(grad, places, None)


@_of_spread.register_fake
def _(grad: Tensor, places: Tensor) -> Tensor:
    return grad.new_empty(len(places), grad.shape[1])


@op("collect_rows_backward")
def _of_collect(
    grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weights."""
    return _spread(grad, places, weights, rows)


@_of_collect.register_fake
def _(grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _spread(
    x: Tensor, places: Tensor, weights: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, places = x.contiguous(), places.contiguous()
    out = x.new_empty(places.numel(), x.shape[1])
    weighted = weights is not None and rows is not None
    weights, rows = (x if each is None else each.contiguous() for each in (weights, rows))
    of_weights = torch.empty_like(weights) if weighted else x
    block, tile, warps = layout.row_tile_sizes(x.shape[1])
    _programs().routed_rows_dispatch[(-(-len(x) // tile),)](
        x, rows, weights, places, out, of_weights, *x.shape,
        K=places.shape[1], WEIGHTED=weighted, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out, of_weights


def _collect(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    rows, places = rows.contiguous(), places.contiguous()
    out = rows.new_empty(len(places), rows.shape[1])
    block, tile, warps = layout.row_tile_sizes(rows.shape[1])
    _programs().routed_rows_combine[(-(-len(places) // tile),)](
        rows, rows if weights is None else weights.contiguous(), places, out, *out.shape,
        K=places.shape[1], WEIGHTED=weights is not None, ROWS=tile, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


def _keep_places(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _differentiate_spread(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _of_spread(grad, *ctx.saved_tensors), None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_collect(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    of_rows, of_weights = _of_collect(grad, *ctx.saved_tensors)
    return of_rows, None, of_weights


spread_rows.register_autograd(_differentiate_spread, setup_context=_keep_places)
collect_rows.register_autograd(_differentiate_collect, setup_context=_keep)
