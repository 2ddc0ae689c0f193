"""Triton programs for glu.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import store_fp8_rows


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """Return act(gate) and its derivative."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    if ACTIVATION == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        return gate * cdf, cdf + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    if ACTIVATION == "gelu-tanh":  # (1 + tanh(a))/2 = sigmoid(2a)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        cdf = tl.sigmoid(inner)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        return gate * cdf, cdf + gate * cdf * (1.0 - cdf) * slope
    if ACTIVATION == "quick-gelu":
        sigmoid = tl.sigmoid(1.702 * gate)
        return gate * sigmoid, sigmoid * (1.0 + 1.702 * gate * (1.0 - sigmoid))
    if ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        return positive * positive, 2.0 * positive
    if ACTIVATION == "relu":
        return tl.maximum(gate, 0.0), (gate > 0.0).to(tl.float32)
    return gate, gate * 0.0 + 1.0


@triton.jit
def glu_forward(
    x, out, num_rows, width, row_stride, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = act(gate) ⊙ (up + OFFSET), for x [rows, 2·width] = [gate, up]; clamped by LIMIT, 0:
    none."""
    num_blocks = tl.cdiv(width, BLOCK)
    column = (tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & (column < width)
    offsets = row * row_stride + column
    gate = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + offsets + width, mask=mask, other=0.0).to(tl.float32)
    if LIMIT > 0:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    activated, _ = _activate(gate, ACTIVATION)
    if OFFSET != 0:
        up += OFFSET
    tl.store(out + row * width + column, (activated * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def glu_forward_fp8(
    x, out, values, scales, num_rows, width, row_stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = act(gate) ⊙ up, stored also in FP8: a program holds whole rows."""
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & (column < width)
    offsets = row * row_stride + column
    gate = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + offsets + width, mask=mask, other=0.0).to(tl.float32)
    activated, _ = _activate(gate, ACTIVATION)
    stored = (activated * up).to(out.dtype.element_ty)
    tl.store(out + row * width + column, stored, mask=mask)
    store_fp8_rows(stored, values, scales, row, width, column, num_rows, mask)


@triton.jit
def glu_backward(
    dy, x, grad_x, num_rows, width, row_stride, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate = dy·(up + OFFSET)·act'(gate),  dup = dy·act(gate), both 0 from ±LIMIT on; grad_x
    [rows, 2·width] holds both."""
    num_blocks = tl.cdiv(width, BLOCK)
    column = (tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & (column < width)
    offsets = row * row_stride + column
    gate = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + offsets + width, mask=mask, other=0.0).to(tl.float32)
    dy_tile = tl.load(dy + row * width + column, mask=mask, other=0.0).to(tl.float32)
    clamped_gate, clamped_up = gate, up
    if LIMIT > 0:
        clamped_gate = tl.minimum(gate, LIMIT)
        clamped_up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    activated, slope = _activate(clamped_gate, ACTIVATION)
    if LIMIT > 0:
        slope = tl.where(gate < LIMIT, slope, 0.0)
        activated = tl.where((up > -LIMIT) & (up < LIMIT), activated, 0.0)
    if OFFSET != 0:
        clamped_up += OFFSET
    grad_ptrs = grad_x + row * (2 * width) + column
    dtype = grad_x.dtype.element_ty
    tl.store(grad_ptrs, (dy_tile * clamped_up * slope).to(dtype), mask=mask)
    tl.store(grad_ptrs + width, (dy_tile * activated).to(dtype), mask=mask)
