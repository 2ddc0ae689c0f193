"""The Triton programs of gated_rms_norm.py: ROWS rows at a time, one group of their channels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    y, z, weight, out, rows, width, share, y_stride, z_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * share
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < share)
    gate = tl.load(z + row * z_stride + first + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + row * y_stride + first + at, mask=inside, other=0.0).to(tl.float32)
    value *= gate * tl.sigmoid(gate)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / share + eps)[:, None]
    gain = tl.load(weight + first + at, mask=at < share, other=0.0).to(tl.float32)
    normal = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + first + at, (normal * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    grad, y, z, weight, grad_y, grad_z, partial, rows, each, width, share, y_stride, z_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * share
    at = tl.arange(0, BLOCK)[None, :]
    program = tl.program_id(0).to(tl.int64)
    gain = tl.load(weight + first + at, mask=at < share, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for number in range(each):
        row = (program * each + number) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < share)
        place = row * width + first + at
        gate = tl.load(z + row * z_stride + first + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + row * y_stride + first + at, mask=inside, other=0.0).to(tl.float32)
        above = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        open_ = tl.sigmoid(gate)
        gated = value * gate * open_
        scale = 1.0 / tl.sqrt(tl.sum(gated * gated, axis=1) / share + eps)[:, None]
        normal = gated * scale
        pulled = above * gain
        change = scale * (pulled - normal * (tl.sum(pulled * normal, axis=1) / share)[:, None])
        of_y = change * gate * open_
        tl.store(grad_y + place, of_y.to(grad_y.dtype.element_ty), mask=inside)
        slope = open_ * (1.0 + gate * (1.0 - open_))
        of_z = change * value * slope
        tl.store(grad_z + place, of_z.to(grad_z.dtype.element_ty), mask=inside)
        summed += tl.sum(above * normal, axis=0)
    to = tl.arange(0, BLOCK)
    tl.store(partial + program * width + first + to, summed, mask=to < share)
