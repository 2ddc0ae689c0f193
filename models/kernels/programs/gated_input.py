"""What the gated convolutions read: w = k ⊙ v of a row, or what stands before the row.

Programs count tokens from the start of their tile, in 32 bits; only the tile's own place in memory
takes 64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_input(
    x, history, start, token, channel, length, width, token_stride, kept,
    GATED: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """w at start + token, fp32; zeros outside of the row. `token` and `channel` have two sides.

    x is that of the tile's start: q, k and v, each as wide as `width`, if GATED; otherwise w.
    HISTORY: the last `kept` inputs before the row, already gated.
    """
    real = channel < width
    here = real & (start + token >= 0) & (start + token < length)
    at = token * token_stride + channel
    if GATED:
        k = tl.load(x + at + width, mask=here, other=0.0).to(tl.float32)
        w = k * tl.load(x + at + 2 * width, mask=here, other=0.0).to(tl.float32)
    else:
        w = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if HISTORY:
        before = real & (start + token < 0) & (start + token >= -kept)
        place = (kept + start + token) * width + channel
        w += tl.load(history + place, mask=before, other=0.0).to(tl.float32)
    return w
