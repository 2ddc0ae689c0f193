"""Triton programs of glu.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .fp8 import store_fp8_rows


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """Return act(gate) and its derivative."""
    if ACTIVATION == "silu":
        open_ = tl.sigmoid(gate)
        return gate * open_, open_ * (1.0 + gate * (1.0 - open_))
    if ACTIVATION == "gelu":
        part = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        return gate * part, part + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    if ACTIVATION == "gelu-tanh":  # (1 + tanh(a))/2 = sigmoid(2a)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        part = tl.sigmoid(inner)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        return gate * part, part + gate * part * (1.0 - part) * slope
    if ACTIVATION == "relu":
        return tl.maximum(gate, 0.0), (gate > 0.0).to(tl.float32)
    return gate, gate * 0.0 + 1.0


@triton.jit
def glu_forward(
    x, out, rows, width, stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    at = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < width)
    place = row * stride + at
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + width, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activate(gate, ACTIVATION)
    tl.store(out + row * width + at, (value * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def glu_forward_fp8(
    x, out, values, scales, rows, width, stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store whole rows also in FP8."""
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < width)
    place = row * stride + at
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + width, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activate(gate, ACTIVATION)
    stored = (value * up).to(out.dtype.element_ty)
    tl.store(out + row * width + at, stored, mask=inside)
    store_fp8_rows(stored, values, scales, row, width, at, rows, inside)


@triton.jit
def glu_backward(
    grad, x, out, rows, width, stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    at = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < width)
    place = row * stride + at
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + width, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activate(gate, ACTIVATION)
    to = out + row * (2 * width) + at
    kind = out.dtype.element_ty
    tl.store(to, (above * up * slope).to(kind), mask=inside)
    tl.store(to + width, (above * value).to(kind), mask=inside)
