"""FP8 matrix products y = x·Wᵀ, with a scale per row in x and W.

    Q(x) = q·s,  q = e4m3(x / s),  s the smallest power of two with |x| / s ≤ 464 in the whole row

    y  = Q(x)·Q(W)ᵀ              Q(W) = q_W·s_W, a scale for each output
    dX = Q(dY·s_W)·q_W           the scales of W lie along the sum, so they go into dY
    dW = dYᵀ·x                   in the compute precision, from x as it was

464 rounds to 448, the largest number of e4m3. Scales are powers of two: x / s and q·s are exact, so
bf16 represents Q(x), and the op's torch twin multiplies rounded tensors. Q(Q(x)) has the same
values and scales as Q(x). W is quantized once for both products. No scale outlives its product:
there is no state.

Where ranks share a row, its scale covers the whole row.
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
from ..parallel.groups import find_axis
from ..parallel.tensor import reduce_max

MULTIPLE = 16
"""Row and column counts of FP8 matrices are multiples of it, as matrix units need."""


def row_scales(maxima: Tensor) -> Tensor:
    """Return the smallest powers of two s ≥ 2⁻¹²⁶ with maximum / s ≤ 464, for maxima [..., 1]."""
    # 464 = 1.8125 · 2⁸: a mantissa above .8125 carries into the exponent.
    bits = ((maxima.float().view(torch.int32) + 0x17FFFF) & 0x7F800000) - (8 << 23)
    return bits.clamp(min=1 << 23).view(torch.float32)


def quantize(x: Tensor, axis: Axis = ALONE, gains: Tensor | None = None) -> Quantized:
    """Return Q(x · gains) for x [..., width], gains [width]. Ranks on `axis` share the rows."""
    maxima = None
    if axis.size > 1:
        maxima = reduce_max(row_maxima(x if gains is None else x * gains), axis)
    if uses_kernel("auto", "fp8", x, kernel.unsupported_reason(x.shape[-1])):
        return Quantized(*kernel.fp8_rows(x, gains, maxima))
    return plain(x, gains, maxima)


def plain(x: Tensor, gains: Tensor | None, maxima: Tensor | None) -> Quantized:
    """Torch twin of the kernel: x [..., width], gains [width], maxima [..., 1]."""
    x = x if gains is None else x * gains
    scales = row_scales(row_maxima(x) if maxima is None else maxima)
    return Quantized((x.float() / scales).to(E4M3), scales)


def row_maxima(x: Tensor) -> Tensor:
    """Return per-row max |x|, fp32 [..., 1]."""
    return x.abs().amax(dim=-1, keepdim=True).float()


def multiply(
    a: Quantized, b: Quantized, bias: Tensor | None, kind: torch.dtype, *, fast: bool
) -> Tensor:
    """Return a·bᵀ (+ bias) [rows, outer] for a [rows, inner] and b [outer, inner]."""
    if a.values.is_cuda and not (a.values.shape[1] % MULTIPLE or len(b.values) % MULTIPLE):
        return multiply_on_matrix_units(a, b, bias, kind, fast=fast)
    return F.linear(a.dequantized(kind), b.dequantized(kind), bias)


def multiply_on_matrix_units(
    a: Quantized, b: Quantized, bias: Tensor | None, kind: torch.dtype, *, fast: bool
) -> Tensor:
    """Compute `multiply` on the matrix units for FP8. `fast` sums with fewer bits (Hopper)."""
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
    num_fp8_rows: int,
    input_axis: str,
    output_axis: str,
) -> Tensor:
    """Return x·Wᵀ + bias [..., out] for x [..., in] and W [out, in], whose first `num_fp8_rows`
    rows are rounded to FP8.

    `values` [..., in] and `scales` [..., 1] are Q(x), if a kernel has stored it. `input_axis` names
    the axis that shards the inputs, `output_axis` the axis that shards the outputs; one or both are
    empty.
    """
    flat = x.flatten(0, -2)
    if values is None or scales is None:
        a = quantize(flat, find_axis(input_axis))
    else:
        a = Quantized(values.flatten(0, -2), scales.flatten(0, -2))
    b = quantize(weight[:num_fp8_rows], find_axis(input_axis))
    y = multiply(a, b, None if bias is None else bias[:num_fp8_rows], x.dtype, fast=True)
    if num_fp8_rows < len(weight):
        unrounded = F.linear(
            flat, weight[num_fp8_rows:], None if bias is None else bias[num_fp8_rows:]
        )
        y = torch.cat([y, unrounded], dim=-1)
    return y.view(*x.shape[:-1], -1)


@fp8_linear.register_fake
def _(x: Tensor, values: Any, scales: Any, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("headrace::fp8_linear_backward", mutates_args=())
def _backward(
    dy: Tensor, weight: Tensor, num_fp8_rows: int, input_axis: str, output_axis: str
) -> Tensor:
    """Return dx [..., in] from dy [..., out]."""
    flat = dy.flatten(0, -2)
    b = quantize(weight[:num_fp8_rows], find_axis(input_axis))
    a = quantize(
        flat[:, :num_fp8_rows], find_axis(output_axis), gains=b.scales.flatten().to(dy.dtype)
    )
    columns = b.values.t().contiguous()
    ones = b.scales.new_ones(len(columns), 1)
    dx = multiply(a, Quantized(columns, ones), None, dy.dtype, fast=False)
    if num_fp8_rows < len(weight):
        dx = torch.addmm(dx, flat[:, num_fp8_rows:], weight[num_fp8_rows:])
    return dx.view(*dy.shape[:-1], -1)


@_backward.register_fake
def _(grad: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, _, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(x, weight)  # the parameter itself: engines gather it again
    ctx.bias = bias is not None


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad_x = _backward(dy, weight, *ctx.options) if ctx.needs_input_grad[0] else None
    flat = dy.flatten(0, -2)
    grad_weight = flat.t().mm(x.flatten(0, -2))
    grad_bias = flat.sum(0) if ctx.bias else None
    return grad_x, None, None, grad_weight, grad_bias, None, None, None


fp8_linear.register_autograd(_autograd_backward, setup_context=_setup_context)
