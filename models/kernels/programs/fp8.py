"""Triton programs for fp8.py, and the function by which other programs store rows in FP8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_scale(row_max):
    """Return the smallest power s = 2^n with row_max / s ≤ 464 = 1.8125 · 2⁸; see the twin."""
    bits = row_max.to(tl.int32, bitcast=True)
    scale = ((bits + 0x17FFFF) & 0x7F800000) - 0x04000000
    return tl.maximum(scale, 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def store_fp8(value, row_max, values, scales, row, width, column, num_rows, mask):
    """Store whole fp32 rows as value / scale in e4m3; row_max [ROWS, 1] is max |value|."""
    scale = row_scale(row_max)
    tl.store(values + row * width + column, (value / scale).to(tl.float8e4nv), mask=mask)
    tl.store(scales + row, scale, mask=row < num_rows)


@triton.jit
def store_fp8_rows(stored, values, scales, row, width, column, num_rows, mask):
    """Store whole rows in FP8 that a program has stored in half precision."""
    value = stored.to(tl.float32)
    row_max = tl.max(tl.where(mask, tl.abs(value), 0.0), axis=1)[:, None]
    store_fp8(value, row_max, values, scales, row, width, column, num_rows, mask)


@triton.jit
def fp8_quantize_rows(
    x, gains, row_maxima, values, scales, num_rows, width,
    GAINS: tl.constexpr, HIGHEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values · scales = x · gains, values in e4m3, scales are powers of two, one per row."""
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < num_rows) & (column < width)
    value = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    if GAINS:
        value *= tl.load(gains + column, mask=column < width, other=0.0).to(tl.float32)
    if HIGHEST:
        row_max = tl.load(row_maxima + row, mask=row < num_rows, other=0.0)
    else:
        row_max = tl.max(tl.where(mask, tl.abs(value), 0.0), axis=1)[:, None]
    store_fp8(value, row_max, values, scales, row, width, column, num_rows, mask)
