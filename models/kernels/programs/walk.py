"""Loads for programs that walk along tokens, UNROLL at a time.

All loads precede the first use, so that many are in flight. Tokens are counted from the pointers,
up to `end`. Unless ALL tokens exist, those outside the range repeat the first or the last and the
caller ignores them: that is cheaper than a mask per token. `channel_mask` None: all channels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_mask(token, first, end, channel, width):
    """Return true for each channel below `width` if first ≤ token < end."""
    token_vector = (
        channel * 0 + token
    )  # a vector: the interpreter takes no scalar comparison as a mask
    return (channel < width) & (token_vector >= first) & (token_vector < end)


@triton.jit
def load_tokens(
    x, first, end, channel, channel_mask, token_stride, ALL: tl.constexpr, UNROLL: tl.constexpr
):
    """Load UNROLL tokens: a tuple of channel vectors."""
    loaded = ()
    for step in tl.static_range(UNROLL):
        token = first + step
        if not ALL:
            token = tl.maximum(tl.minimum(token, end - 1), 0)
        ptrs = x + token * token_stride + channel
        if channel_mask is None:
            loaded = loaded + (tl.load(ptrs),)
        else:
            loaded = loaded + (tl.load(ptrs, mask=channel_mask, other=0.0),)
    return loaded


@triton.jit
def load_inputs(
    x, first, end, channel, channel_mask, width, token_stride,
    GATED: tl.constexpr, ALL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Load UNROLL tokens in fp32: w = k ⊙ v, or x itself."""
    k_or_x = load_tokens(
        x + (width if GATED else 0), first, end, channel, channel_mask, token_stride, ALL, UNROLL
    )
    v = k_or_x
    if GATED:
        v = load_tokens(x + 2 * width, first, end, channel, channel_mask, token_stride, ALL, UNROLL)
    inputs = ()
    for step in tl.static_range(UNROLL):
        w = k_or_x[step].to(tl.float32)
        if GATED:
            w *= v[step].to(tl.float32)
        inputs = inputs + (w,)
    return inputs


@triton.jit
def load_earlier_input(
    x, history, start, token, channel, length, width, token_stride, history_length,
    GATED: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Load one token's w, at start + token in the row: zeros outside the row, except for HISTORY,
    the last `history_length` inputs before it, already gated. `token` is a vector too.
    """
    channel_mask = channel < width
    mask = channel_mask & (start + token >= 0) & (start + token < length)
    offsets = token * token_stride + channel
    if GATED:
        k = tl.load(x + offsets + width, mask=mask, other=0.0).to(tl.float32)
        w = k * tl.load(x + offsets + 2 * width, mask=mask, other=0.0).to(tl.float32)
    else:
        w = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if HISTORY:
        history_mask = channel_mask & (start + token < 0) & (start + token >= -history_length)
        history_offsets = (history_length + start + token) * width + channel
        w += tl.load(history + history_offsets, mask=history_mask, other=0.0).to(tl.float32)
    return w


@triton.jit
def zero_sums(COUNT: tl.constexpr, CHANNELS: tl.constexpr):
    """Return zeros for sums of a thread's channels: a tuple, so that each stays in its thread."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([CHANNELS], dtype=tl.float32),)
    return sums


@triton.jit
def add_products(sums, values, factor, COUNT: tl.constexpr):
    """Return sums + values · factor, COUNT vectors."""
    new_sums = ()
    for number in tl.static_range(COUNT):
        new_sums = new_sums + (sums[number] + values[number] * factor,)
    return new_sums
