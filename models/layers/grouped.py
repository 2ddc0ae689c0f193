"""Grouped matrix products for experts: each row group is multiplied by its own matrix.

On CUDA in bf16 a product is a single launch, torch's `grouped_mm`, which reads the group ends on
the device. Elsewhere it loops over the groups, which needs the ends in host memory: `group_ends`
copies them there once for all products in a layer.

A group's row count is data, which compilers and fake tensors cannot know. The product is therefore
a custom op: result shapes follow from input shapes.

Under autocast the product rounds its inputs as torch's matrix products do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

DYNAMIC_TAGS = (torch.Tag.cudagraph_unsafe,)
"""A loop on a GPU has as many launches as groups with rows, so CUDA graphs must leave it out."""
ALIGNMENT = 8
"""`grouped_mm` needs matrix rows in multiples of 16 bytes."""
FAST_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch's `grouped_mm` is one launch."""


def group_ends(
    counts: Tensor, x: Tensor, *weights: Tensor, on_host: Tensor | None = None
) -> Tensor:
    """Return end rows by group, int32 [groups], on the device where products of x with `weights`
    read them.

    counts int64 [groups] are row counts. `on_host` holds the same in host memory, if the caller has
    read them; otherwise the host waits here for the device if a product is a loop.
    """
    problem = single_launch_problem(x, *weights)
    if problem is not None:
        if x.device.type == "cuda":
            message = "the products of experts run one by one, and the host waits once a layer"
            warnings.warn(f"{message}: {problem}", RuntimeWarning, stacklevel=2)
        counts = counts.cpu() if on_host is None else on_host
    return counts.cumsum(0, dtype=torch.int32)


def single_launch_problem(x: Tensor, *weights: Tensor) -> str | None:
    """Return why the product x [rows, in] · weights [groups, out, in] is a loop, or None."""
    device = x.device
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    dtype = _autocast_dtype(device.type) or x.dtype
    if dtype != torch.bfloat16:
        return f"torch's grouped_mm multiplies bf16, not {dtype}"
    sizes = {size for weight in weights for size in weight.shape[1:]}
    if unaligned := sorted(size for size in sizes if size % ALIGNMENT):
        return (
            f"{ALIGNMENT} does not divide {', '.join(map(str, unaligned))}, a width of the experts"
        )
    if not is_compiling():  # a query of the driver would break the graph
        capability = torch.cuda.get_device_capability(device)
        if capability[0] not in FAST_CAPABILITIES:
            return f"this GPU has compute capability {capability[0]}.{capability[1]}"
    return None


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return x·Wᵀ [rows, out], where W is the row's group in weights [groups, out, in]. x
    [rows, in] is sorted by group; `ends` comes from `group_ends`. Rows after the last group have
    undefined products."""
    half = _autocast_dtype(x.device.type)
    if half is not None:
        x, weights = x.to(half), weights.to(half)
    product: Tensor = _grouped_product(x, weights, ends)
    return product


def add_grouped_bias(y: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
    """Return y + b [rows, out], where b is the row's group in biases [groups, out]. y [rows, out]
    is sorted by group. Gradients are summed without atomics."""
    summed: Tensor = _add_grouped_bias(y, biases.to(y.dtype), ends)
    return summed


@torch.library.custom_op("headrace::grouped_bias", mutates_args=())
def _add_grouped_bias(y: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
    rows = torch.arange(len(y), device=y.device, dtype=ends.dtype)
    groups = torch.searchsorted(ends.to(y.device), rows, right=True)
    return y + biases.index_select(0, groups.clamp(max=len(biases) - 1))


@torch.library.custom_op("headrace::grouped_product", mutates_args=(), tags=DYNAMIC_TAGS)
def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    multiply = product_in_one_launch if ends.device.type == "cuda" else product_by_group
    return multiply(x, weights, ends)


@torch.library.custom_op("headrace::grouped_outer", mutates_args=(), tags=DYNAMIC_TAGS)
def grouped_outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return per-group sums Σ y⊗x, [groups, out, in], for y [rows, out] and x [rows, in]; zeros for
    an empty group."""
    multiply = outer_in_one_launch if ends.device.type == "cuda" else outer_by_group
    return multiply(y, x, ends)


def product_in_one_launch(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_product` by torch's grouped_mm: x [rows, in], weights [groups, out, in]."""
    if not len(x):
        return x.new_empty(0, weights.shape[1])
    return F.grouped_mm(x.contiguous(), weights.transpose(1, 2), offs=ends)


def product_by_group(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_product` in a loop: x [rows, in], weights [groups, out, in]."""
    groups = zip(_groups(ends), weights, strict=True)
    products = [x[rows] @ weight.T for rows, weight in groups]
    rest = len(x) - sum(map(len, products))
    return torch.cat([*products, x.new_zeros(rest, weights.shape[1])] if rest else products)


def outer_in_one_launch(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_outer` by torch's grouped_mm: y [rows, out], x [rows, in]."""
    if not len(x):
        return x.new_zeros(len(ends), y.shape[1], x.shape[1])
    products = F.grouped_mm(y.contiguous().T, x.contiguous(), offs=ends)
    if leaves_garbage(ends.device):
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        products.masked_fill_(empty[:, None, None], 0)
    return products


def leaves_garbage(device: torch.device) -> bool:
    """Return True if grouped_mm leaves empty groups' products unwritten: on Blackwell (pytorch
    issue 172439)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def outer_by_group(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_outer` in a loop: y [rows, out], x [rows, in]."""
    return torch.stack([y[rows].T @ x[rows] for rows in _groups(ends)])


def _groups(ends: Tensor) -> Iterator[slice]:
    """Yield the groups' row slices."""
    for begin, end in pairwise([0, *ends.tolist()]):
        yield slice(begin, end)


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@_grouped_product.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


@grouped_outer.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return y.new_empty(ends.shape[0], y.shape[1], x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weights, ends = ctx.saved_tensors
    grad_x = _grouped_product(dy, weights.transpose(1, 2), ends)
    return grad_x, grouped_outer(dy, x, ends), None


_grouped_product.register_autograd(_backward, setup_context=_setup_context)


@_add_grouped_bias.register_fake
def _(y: Tensor, biases: Tensor, ends: Tensor) -> Tensor:
    return torch.empty_like(y)


def _setup_bias_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward_bias(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    (ends,) = ctx.saved_tensors
    return dy, grouped_outer(dy, dy.new_ones(len(dy), ALIGNMENT), ends)[..., 0], None


_add_grouped_bias.register_autograd(_backward_bias, setup_context=_setup_bias_context)


@register_flop_formula(torch.ops.headrace.grouped_product)
def _product_flops(x: Any, weights: Any, *arguments: Any, **_: Any) -> int:
    return int(2 * x[0] * weights[1] * weights[2])


@register_flop_formula(torch.ops.headrace.grouped_outer)
def _outer_flops(y: Any, x: Any, *arguments: Any, **_: Any) -> int:
    return int(2 * y[0] * y[1] * x[1])
