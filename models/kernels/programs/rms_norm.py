"""Triton programs of rms_norm.py: ROWS whole rows at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import store_fp8_rows


@triton.jit
def rms_norm_forward(
    x, residual, weight, out, summed, values, scales, rows, width, eps,
    ADD: tl.constexpr, EPS_OUTSIDE: tl.constexpr, FP8: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < width)
    place = row * width + at
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(summed.dtype.element_ty)
        tl.store(summed + place, kept, mask=inside)
        value = kept.to(tl.float32)
    power = (tl.sum(value * value, axis=1) / width)[:, None]
    scale = 1.0 / (tl.sqrt(power) + eps) if EPS_OUTSIDE else 1.0 / tl.sqrt(power + eps)
    gain = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    # Round the normalised row before the weight, as the twin does.
    normal = (value * scale).to(summed.dtype.element_ty).to(tl.float32)
    stored = (normal * gain).to(out.dtype.element_ty)
    tl.store(out + place, stored, mask=inside)
    if FP8:
        store_fp8_rows(stored, values, scales, row, width, at, rows, inside)


@triton.jit
def rms_norm_backward(
    grad, grad_summed, x, weight, out, partial, rows, each, width, eps,
    ADD: tl.constexpr, EPS_OUTSIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)[None, :]
    program = tl.program_id(0).to(tl.int64)
    gain = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(each):
        row = (program * each + number) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < width)
        place = row * width + at
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        power = (tl.sum(value * value, axis=1) / width)[:, None]
        pulled = above * gain
        along = (tl.sum(pulled * value, axis=1) / width)[:, None]
        if EPS_OUTSIDE:
            root = tl.sqrt(power)
            scale = 1.0 / (root + eps)
            bend = tl.where(root > 0.0, scale * scale / tl.where(root > 0.0, root, 1.0), 0.0)
        else:
            scale = 1.0 / tl.sqrt(power + eps)
            bend = scale * scale * scale
        change = pulled * scale - value * along * bend
        if ADD:
            change += tl.load(grad_summed + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, change.to(out.dtype.element_ty), mask=inside)
        summed += tl.sum(above * value * scale, axis=0)
    to = tl.arange(0, BLOCK)
    tl.store(partial + program * width + to, summed, mask=to < width)
