"""Triton program of rope.py: rotate a token's heads, a few at a time, by one set of angles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_rotate(
    x, cos, sin, out, heads, dim, length, half, row_stride, token_stride, head_stride,
    angle_stride,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    at = tl.arange(0, HALF)[None, :]
    angle = row * angle_stride + token * half + at
    c = tl.load(cos + angle, mask=at < half, other=0.0)
    s = tl.load(sin + angle, mask=at < half, other=0.0)
    if INVERSE:
        s = -s
    x += row * row_stride + token * token_stride
    out += (row * length + token) * heads * dim
    kind = out.dtype.element_ty
    for first in range(tl.cdiv(heads, HEADS)):
        head = first * HEADS + tl.arange(0, HEADS)[:, None]
        turning = (head < heads) & (at < half)
        place = head * dim + at
        from_ = x + head.to(tl.int64) * head_stride + at
        a = tl.load(from_, mask=turning, other=0.0).to(tl.float32)
        b = tl.load(from_ + half, mask=turning, other=0.0).to(tl.float32)
        tl.store(out + place, (a * c - b * s).to(kind), mask=turning)
        tl.store(out + place + half, (b * c + a * s).to(kind), mask=turning)
        if REST > 0:  # channels without rotation
            still = 2 * half + tl.arange(0, REST)[None, :]
            there = (head < heads) & (still < dim)
            from_ = x + head.to(tl.int64) * head_stride + still
            tl.store(out + head * dim + still, tl.load(from_, mask=there, other=0.0), mask=there)
