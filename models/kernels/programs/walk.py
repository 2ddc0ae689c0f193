"""What is read by programs that walk along tokens, UNROLL at a time.

Reading comes before the first token is used, so that many loads are under way at once. Tokens are
counted from where the pointers stand, and there are `end`. Unless ALL of them are there, the first
and the last stand for those beyond, and whoever reads makes nothing of them: that is cheaper than a
mask for each. `real` says which channels there are; None: all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def there(token, first, end, channel, width):
    """Whether a token is one of those from `first` to `end`, for each channel that is one."""
    tokens = channel * 0 + token  # as a vector: interpreted, a comparison of numbers is no mask
    return (channel < width) & (tokens >= first) & (tokens < end)


@triton.jit
def read(x, first, end, channel, real, stride, ALL: tl.constexpr, UNROLL: tl.constexpr):
    """A tensor as it is."""
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
def inputs_of(
    x, first, end, channel, real, width, stride, GATED: tl.constexpr, ALL: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """w = k ⊙ v, or x itself; fp32."""
    left = read(x + (width if GATED else 0), first, end, channel, real, stride, ALL, UNROLL)
    right = left
    if GATED:
        right = read(x + 2 * width, first, end, channel, real, stride, ALL, UNROLL)
    found = ()
    for step in tl.static_range(UNROLL):
        w = left[step].to(tl.float32)
        if GATED:
            w *= right[step].to(tl.float32)
        found = found + (w,)
    return found


@triton.jit
def earlier_input(
    x, history, start, token, channel, length, width, token_stride, kept,
    GATED: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """The same of one token, start + token of the row: zeros outside of the row, but for what
    HISTORY has, the last `kept` inputs before it, already gated. `token` is a vector, too."""
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
def zeros(COUNT: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums of a thread's channels: a tuple, so that all of them are its own."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([CHANNELS], dtype=tl.float32),)
    return found


@triton.jit
def plus_products(sums, values, factor, COUNT: tl.constexpr):
    found = ()
    for number in tl.static_range(COUNT):
        found = found + (sums[number] + values[number] * factor,)
    return found
