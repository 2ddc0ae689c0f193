"""Loads of programs that walk along tokens, UNROLL at a time.

All loads precede the first use, so that many are in flight. Tokens are counted from the pointers,
up to `end`. Unless ALL of them exist, tokens outside the range repeat the first or the last one and
the caller ignores them: that is cheaper than a mask for each. `real` masks the channels; None: all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_mask(token, first, end, channel, width):
    """Return true for each real channel if a token lies between `first` and `end`."""
    tokens = channel * 0 + token  # a vector: the interpreter takes no scalar comparison as a mask
    return (channel < width) & (tokens >= first) & (tokens < end)


@triton.jit
def load_tokens(x, first, end, channel, real, stride, ALL: tl.constexpr, UNROLL: tl.constexpr):
    """Load a tensor unchanged."""
    found = ()
    for step in tl.static_range(UNROLL):
        token = first + step
        if not ALL:
            token = tl.maximum(tl.minimum(token, end - 1), 0)
        place = x + token * stride + channel
        if real is None:
            found = found + (tl.load(place),)
        else:
            found = found + (tl.load(place, mask=real, other=0.0),)
    return found


@triton.jit
def load_inputs(
    x, first, end, channel, real, width, stride, GATED: tl.constexpr, ALL: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Load w = k ⊙ v, or x itself, in fp32."""
    left = load_tokens(x + (width if GATED else 0), first, end, channel, real, stride, ALL, UNROLL)
    right = left
    if GATED:
        right = load_tokens(x + 2 * width, first, end, channel, real, stride, ALL, UNROLL)
    found = ()
    for step in tl.static_range(UNROLL):
        w = left[step].to(tl.float32)
        if GATED:
            w *= right[step].to(tl.float32)
        found = found + (w,)
    return found


@triton.jit
def load_earlier_input(
    x, history, start, token, channel, length, width, token_stride, kept,
    GATED: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Load w of one token, start + token of the row: zeros outside the row, except for HISTORY, the
    last `kept` inputs before it, already gated. `token` is a vector too."""
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


@triton.jit
def zero_sums(COUNT: tl.constexpr, CHANNELS: tl.constexpr):
    """Return zeros for sums of a thread's channels: a tuple, so that each stays in its thread."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([CHANNELS], dtype=tl.float32),)
    return found


@triton.jit
def add_products(sums, values, factor, COUNT: tl.constexpr):
    found = ()
    for number in tl.static_range(COUNT):
        found = found + (sums[number] + values[number] * factor,)
    return found
