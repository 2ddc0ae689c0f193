"""Triton programs for rms_norm.py: ROWS whole rows at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import store_fp8_rows


@triton.jit
def rms_norm_forward(
    x, residual, weight, out, summed, values, scales, num_rows, width, eps,
    ADD: tl.constexpr, EPS_OUTSIDE: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = weight · x / √(mean(x²) + eps), by row; EPS_OUTSIDE: / (√mean(x²) + eps).

    ADD: x + residual replaces x, and is stored in `summed`. FP8 also stores `out` in FP8.
    """
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & (column < width)
    offsets = row * width + column
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + offsets, rounded, mask=mask)
        value = rounded.to(tl.float32)
    mean_square = (tl.sum(value * value, axis=1) / width)[:, None]
    scale = 1.0 / (tl.sqrt(mean_square) + eps) if EPS_OUTSIDE else 1.0 / tl.sqrt(mean_square + eps)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    # Round the normalised row before the weight, as the twin does.
    normed = (value * scale).to(summed.dtype.element_ty).to(tl.float32)
    stored = (normed * gain).to(out.dtype.element_ty)
    tl.store(out + offsets, stored, mask=mask)
    if FP8:
        store_fp8_rows(stored, values, scales, row, width, column, num_rows, mask)


@triton.jit
def rms_norm_backward(
    dy, grad_sum, x, weight, grad_x, weight_grads, num_rows, tiles_per_program, width, eps,
    ADD: tl.constexpr, EPS_OUTSIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx = s·u − x·mean(u·x)·c (+ grad_sum),  u = dy·weight,  s the row's scale.

    c, `curvature`, is s³; EPS_OUTSIDE: s²/√mean(x²). weight_grads = Σ dy·x·s over a program's rows,
    fp32 [programs, width].
    """
    column = tl.arange(0, BLOCK)[None, :]
    program = tl.program_id(0).to(tl.int64)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], dtype=tl.float32)
    for index in tl.range(0, tiles_per_program, num_stages=STAGES):
        row = (program * tiles_per_program + index) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < num_rows) & (column < width)
        offsets = row * width + column
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        dy_tile = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        mean_square = (tl.sum(value * value, axis=1) / width)[:, None]
        normed_grad = dy_tile * gain
        projection = (tl.sum(normed_grad * value, axis=1) / width)[:, None]
        if EPS_OUTSIDE:
            root = tl.sqrt(mean_square)
            scale = 1.0 / (root + eps)
            curvature = tl.where(root > 0.0, scale * scale / tl.where(root > 0.0, root, 1.0), 0.0)
        else:
            scale = 1.0 / tl.sqrt(mean_square + eps)
            curvature = scale * scale * scale
        dx = normed_grad * scale - value * projection * curvature
        if ADD:
            dx += tl.load(grad_sum + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + offsets, dx.to(grad_x.dtype.element_ty), mask=mask)
        weight_grad += tl.sum(dy_tile * value * scale, axis=0)
    weight_column = tl.arange(0, BLOCK)
    tl.store(
        weight_grads + program * width + weight_column, weight_grad, mask=weight_column < width
    )
