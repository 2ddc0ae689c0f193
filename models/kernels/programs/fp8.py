"""Triton programs of fp8.py, and the function by which other programs store rows in FP8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_scale(highest):
    """Return the smallest power of two s with highest / s ≤ 464 = 1.8125 · 2⁸; see the twin."""
    bits = highest.to(tl.int32, bitcast=True)
    scale = ((bits + 0x17FFFF) & 0x7F800000) - 0x04000000
    return tl.maximum(scale, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def store_fp8(value, highest, values, scales, row, width, at, num_rows, inside):
    """Store whole rows of fp32, of which `highest` [ROWS, 1] are the largest absolute values."""
    scale = row_scale(highest)
    tl.store(values + row * width + at, (value / scale).to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale, mask=row < num_rows)


@triton.jit
def store_fp8_rows(stored, values, scales, row, width, at, num_rows, inside):
    """Store whole rows that a program has stored in half precision."""
    value = stored.to(tl.float32)
    top = tl.max(tl.where(inside, tl.abs(value), 0.0), axis=1)[:, None]
    store_fp8(value, top, values, scales, row, width, at, num_rows, inside)


@triton.jit
def fp8_quantize_rows(
    x, gains, highest, values, scales, num_rows, width,
    GAINS: tl.constexpr, HIGHEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (row < num_rows) & (at < width)
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if GAINS:
        value *= tl.load(gains + at, mask=at < width, other=0.0).to(tl.float32)
    if HIGHEST:
        top = tl.load(highest + row, mask=row < num_rows, other=0.0)
    else:
        top = tl.max(tl.where(inside, tl.abs(value), 0.0), axis=1)[:, None]
    store_fp8(value, top, values, scales, row, width, at, num_rows, inside)
