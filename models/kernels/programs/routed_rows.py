"""Triton programs of routed_rows.py: ROWS tokens at a time, whole, with their K rows of experts.

Every row belongs to one token, so a program writes what no other program writes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def routed_rows_dispatch(
    x, rows, weights, places, out, of_weights, tokens, width,
    K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each token to its K rows. With weights: times the weight of each, and the product of
    the token with the K rows that stood there."""
    at = tl.arange(0, BLOCK)[None, :]
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = token < tokens
    inside = here[:, None] & (at < width)
    value = tl.load(x + token[:, None] * width + at, mask=inside, other=0.0)
    for number in tl.static_range(K):
        choice = token * K + number
        place = tl.load(places + choice, mask=here, other=0)[:, None] * width + at
        if WEIGHTED:
            wide = value.to(tl.float32)
            stood = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(of_weights + choice, tl.sum(wide * stood, axis=1), mask=here)
            weight = tl.load(weights + choice, mask=here, other=0.0).to(tl.float32)
            tl.store(out + place, (wide * weight[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(out + place, value, mask=inside)


@triton.jit
def routed_rows_combine(
    rows, weights, places, out, tokens, width,
    K: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the K rows of each token, with weights or without."""
    at = tl.arange(0, BLOCK)[None, :]
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = token < tokens
    inside = here[:, None] & (at < width)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for number in tl.static_range(K):
        choice = token * K + number
        place = tl.load(places + choice, mask=here, other=0)[:, None] * width + at
        value = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + choice, mask=here, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(out + token[:, None] * width + at, total.to(out.dtype.element_ty), mask=inside)
