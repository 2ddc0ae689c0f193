"""Grouped matrix products for experts: each group of rows is multiplied by its own matrix.

The number of rows of a group is data, which compilers and fake tensors cannot know. The product is
therefore one custom op: the shapes of its results follow from the shapes of its inputs.

Under autocast the product rounds its inputs as torch's matrix products do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

WAITS = (torch.Tag.cudagraph_unsafe,)
"""These ops wait for the counts on the host, so CUDA graphs must leave them out."""


def grouped_product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """x [tokens, in] is sorted by group; weights [groups, out, in]; int64 counts of rows."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        x, weights = x.to(half), weights.to(half)
    product: Tensor = _grouped_product(x, weights, counts)
    return product


@torch.library.custom_op("headrace::grouped_product", mutates_args=(), tags=WAITS)
def _grouped_product(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    groups = zip(x.split(counts.tolist()), weights, strict=True)
    return torch.cat([rows @ weight.T for rows, weight in groups])


@torch.library.custom_op("headrace::grouped_outer", mutates_args=(), tags=WAITS)
def grouped_outer(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Σ y⊗x over the rows of each group, [groups, out, in]; zeros for an empty group."""
    sizes = counts.tolist()
    return torch.stack([a.T @ b for a, b in zip(y.split(sizes), x.split(sizes), strict=True)])


@_grouped_product.register_fake
def _(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


@grouped_outer.register_fake
def _(y: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return y.new_empty(counts.shape[0], y.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weights, counts = ctx.saved_tensors
    of_x = _grouped_product(gradient, weights.transpose(1, 2), counts)
    return of_x, grouped_outer(gradient, x, counts), None


_grouped_product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.headrace.grouped_product)
def _product_flops(x: Any, weights: Any, *others: Any, **_: Any) -> int:
    return int(2 * x[0] * weights[1] * weights[2])


@register_flop_formula(torch.ops.headrace.grouped_outer)
def _outer_flops(y: Any, x: Any, *others: Any, **_: Any) -> int:
    return int(2 * y[0] * y[1] * x[1])
