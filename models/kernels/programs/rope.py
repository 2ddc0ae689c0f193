"""Triton program for rope.py: rotate a token's heads, a few at a time, by the same angles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_rotate(
    x, cos, sin, out, num_heads, dim, length, half, row_stride, token_stride, head_stride,
    angle_stride,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(a, b) → (a·cos − b·sin, b·cos + a·sin), where channels 0 to 2·half are [a, b].

    INVERSE negates the angles. The REST channels behind them are copied.
    """
    row = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    channel = tl.arange(0, HALF)[None, :]
    angle_offsets = row * angle_stride + token * half + channel
    c = tl.load(cos + angle_offsets, mask=channel < half, other=0.0)
    s = tl.load(sin + angle_offsets, mask=channel < half, other=0.0)
    if INVERSE:
        s = -s
    x += row * row_stride + token * token_stride
    out += (row * length + token) * num_heads * dim
    dtype = out.dtype.element_ty
    for head_block in range(tl.cdiv(num_heads, HEADS)):
        head = head_block * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < num_heads) & (channel < half)
        out_offsets = head * dim + channel
        x_ptrs = x + head.to(tl.int64) * head_stride + channel
        a = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptrs + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + out_offsets, (a * c - b * s).to(dtype), mask=mask)
        tl.store(out + out_offsets + half, (b * c + a * s).to(dtype), mask=mask)
        if REST > 0:  # channels without rotation
            rest_channel = 2 * half + tl.arange(0, REST)[None, :]
            rest_mask = (head < num_heads) & (rest_channel < dim)
            x_ptrs = x + head.to(tl.int64) * head_stride + rest_channel
            tl.store(
                out + head * dim + rest_channel,
                tl.load(x_ptrs, mask=rest_mask, other=0.0),
                mask=rest_mask,
            )
