"""Products with a matrix in FP8: y = x·Wᵀ, with a scale for each row of x and of W.

    Q(x) = q·s,  q = e4m3(x / s),  s the smallest power of two with |x| / s ≤ 464 in the whole row

    y  = Q(x)·Q(W)ᵀ              Q(W) = q_W·s_W, a scale for each output
    dX = Q(dY·s_W)·q_W           the scales of W lie along the sum, so they go into dY
    dW = dYᵀ·x                   in the compute precision, from x as it was

464 rounds to 448, the largest number of e4m3. Scales are powers of two: x / s and q·s are exact, so
bf16 represents Q(x), and the twin of the whole op is a product of rounded tensors. Q(Q(x)) has the
values and the scales of Q(x). W is quantized once for both products. No scale outlives its product:
there is no state.

Where ranks share a row, its scale is that of the whole row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels import fp8 as kernel
from ..kernels.choice import uses_kernel
from ..kernels.fp8 import E4M3, Quantized
from ..parallel.axes import ALONE, Axis
from ..parallel.groups import named
from ..parallel.tensor import highest

MULTIPLE = 16
"""Rows and columns of a matrix in FP8 are multiples of it, as matrix units need."""


def row_scales(tops: Tensor) -> Tensor:
    """Return the smallest power of two s ≥ 2⁻¹²⁶ with top / s ≤ 464, for each top ≥ 0."""
    # 464 = 1.8125 · 2⁸: a mantissa above .8125 carries into the exponent.
    bits = ((tops.float().view(torch.int32) + 0x17FFFF) & 0x7F800000) - (8 << 23)
    return bits.clamp(min=1 << 23).view(torch.float32)


def quantize(x: Tensor, axis: Axis = ALONE, gains: Tensor | None = None) -> Quantized:
    """Return Q(x · gains). The ranks of `axis` share the rows of x."""
    top = None
    if axis.size > 1:
        top = highest(tops_of(x if gains is None else x * gains), axis)
    if uses_kernel("auto", "fp8", x, kernel.unsupported_reason(x.shape[-1])):
        return Quantized(*kernel.fp8_rows(x, gains, top))
    return plain(x, gains, top)


def plain(x: Tensor, gains: Tensor | None, top: Tensor | None) -> Quantized:
    """Reference implementation of the kernel in torch."""
    x = x if gains is None else x * gains
    scales = row_scales(tops_of(x) if top is None else top)
    return Quantized((x.float() / scales).to(E4M3), scales)


def tops_of(x: Tensor) -> Tensor:
    """Return the largest absolute value of each row, [..., 1]."""
    return x.abs().amax(dim=-1, keepdim=True).float()


def product(
    a: Quantized, b: Quantized, bias: Tensor | None, kind: torch.dtype, *, fast: bool
) -> Tensor:
    """Return a·bᵀ (+ bias) for a [rows, inner] and b [outer, inner]."""
    if a.values.is_cuda and not (a.values.shape[1] % MULTIPLE or len(b.values) % MULTIPLE):
        return scaled_product(a, b, bias, kind, fast=fast)
    return F.linear(a.dequantized(kind), b.dequantized(kind), bias)


def scaled_product(
    a: Quantized, b: Quantized, bias: Tensor | None, kind: torch.dtype, *, fast: bool
) -> Tensor:
    """`product` by the matrix units for FP8. `fast` sums with fewer bits than fp32 has (Hopper)."""
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.scales,
        scale_b=b.scales.t(),
        bias=bias,
        out_dtype=kind,
        use_fast_accum=fast,
    )


@torch.library.custom_op("headrace::fp8_linear", mutates_args=())
def fp8_linear(
    x: Tensor,
    values: Tensor | None,
    scales: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rows: int,
    reads: str,
    writes: str,
) -> Tensor:
    """Return x·Wᵀ + bias, with the first `rows` rows of W in FP8, and the others as they are.

    `values` and `scales` are Q(x), if a kernel has stored it. `reads` names the axis that shards
    the inputs, `writes` the axis that shards the outputs; one or both are empty.
    """
    flat = x.flatten(0, -2)
    if values is None or scales is None:
        a = quantize(flat, named(reads))
    else:
        a = Quantized(values.flatten(0, -2), scales.flatten(0, -2))
    b = quantize(weight[:rows], named(reads))
    y = product(a, b, None if bias is None else bias[:rows], x.dtype, fast=True)
    if rows < len(weight):
        rest = F.linear(flat, weight[rows:], None if bias is None else bias[rows:])
        y = torch.cat([y, rest], dim=-1)
    return y.view(*x.shape[:-1], -1)


@fp8_linear.register_fake
def _(x: Tensor, values: Any, scales: Any, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("headrace::fp8_linear_backward", mutates_args=())
def _backward(grad: Tensor, weight: Tensor, rows: int, reads: str, writes: str) -> Tensor:
    """Return the gradient of x."""
    flat = grad.flatten(0, -2)
    b = quantize(weight[:rows], named(reads))
    a = quantize(flat[:, :rows], named(writes), gains=b.scales.flatten().to(grad.dtype))
    columns = b.values.t().contiguous()
    ones = b.scales.new_ones(len(columns), 1)
    dx = product(a, Quantized(columns, ones), None, grad.dtype, fast=False)
    if rows < len(weight):
        dx = torch.addmm(dx, flat[:, rows:], weight[rows:])
    return dx.view(*grad.shape[:-1], -1)


@_backward.register_fake
def _(grad: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, _, weight, bias, *ctx.how = inputs
    ctx.save_for_backward(x, weight)  # the parameter itself: engines gather it again
    ctx.bias = bias is not None


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = _backward(grad, weight, *ctx.how) if ctx.needs_input_grad[0] else None
    flat = grad.flatten(0, -2)
    of_weight = flat.t().mm(x.flatten(0, -2))
    of_bias = flat.sum(0) if ctx.bias else None
    return of_x, None, None, of_weight, of_bias, None, None, None


fp8_linear.register_autograd(_differentiate, setup_context=_keep)
