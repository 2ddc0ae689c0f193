"""The Triton programs of short_convolution.py.

A program has a tile of tokens and channels. It reads the tile once for each tap, shifted by a
token: all but the first reading come from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gated_input import gated_input


@triton.jit
def _filtered(
    x, history, taps, bias, skip, positions, start, token, channel, length, width, share,
    token_stride,
    REACH: tl.constexpr, SHIFT: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Σ_j h[j]·w[t−j] (+ bias + skip·w[t]) for t = start + token + SHIFT."""
    if PACKED:
        there = (start + token + SHIFT >= 0) & (start + token + SHIFT < length)
        position = tl.load(positions + token + SHIFT, mask=there, other=0)
    real = channel < width
    for lag in tl.static_range(REACH):
        w = gated_input(
            x, history, start, (token + (SHIFT - lag))[:, None], channel[None, :], length, width,
            token_stride, REACH - 1, GATED, HISTORY,
        )  # fmt: skip
        if PACKED:
            w = tl.where((position >= lag)[:, None], w, 0.0)
        tap = tl.load(taps + channel // share * REACH + lag, mask=real, other=0.0).to(tl.float32)
        if lag == 0:
            y = w * tap[None, :]
            if SKIP:
                y += w * tl.load(skip + channel, mask=real, other=0.0).to(tl.float32)[None, :]
        else:
            y += w * tap[None, :]
    if BIAS:
        y += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def forward(
    x, history, taps, bias, skip, positions, out, length, width, share, row_stride, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(width, CHANNELS)
    start = tl.program_id(0) // blocks * TOKENS
    token = tl.arange(0, TOKENS)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    x += row * row_stride + start.to(tl.int64) * token_stride
    y = _filtered(
        x, history + row * (REACH - 1) * width, taps, bias, skip,
        positions + row * length + start, start, token, channel, length, width, share,
        token_stride, REACH, 0, GATED, BIAS, SKIP, HISTORY, PACKED,
    )  # fmt: skip
    here = (start + token < length)[:, None] & (channel < width)[None, :]
    if SILU:
        y *= tl.sigmoid(y)
    if GATED:
        q = tl.load(x + token[:, None] * token_stride + channel[None, :], mask=here, other=0.0)
        y *= q.to(tl.float32)
    out += (row * length + start) * width
    tl.store(out + token[:, None] * width + channel[None, :], y.to(out.dtype.element_ty), mask=here)


@triton.jit
def backward(
    grad, x, history, taps, bias, skip, positions, grad_x, grad_history, partial,
    length, width, share, row_stride, token_stride, each,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`each` tiles of tokens; of the filter, bias and skip, `partial` gets what they add up to.

    With g the gradient of the sum over the taps: w[s] gets Σ_j h[j]·g[s+j], h[j] Σ_t g[t]·w[t−j].
    """
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(width, CHANNELS)
    part = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < width
    token = tl.arange(0, TOKENS)
    history += row * (REACH - 1) * width
    grad_history += row * (REACH - 1) * width
    sums = ()
    for _ in tl.static_range(REACH + 2):
        sums = sums + (tl.zeros([CHANNELS], dtype=tl.float32),)
    first = 0
    if HISTORY:
        first = 1 - REACH  # what stands before the row has gradients as well
    for number in range(each):
        start = (part * each + number) * TOKENS + first
        here = ((start + token >= 0) & (start + token < length))[:, None] & real[None, :]
        x_tile = x + row * row_stride + start.to(tl.int64) * token_stride
        tile = (row * length + start) * width
        at = token[:, None] * token_stride + channel[None, :]
        place = token[:, None] * width + channel[None, :]
        positions_tile = positions + row * length + start

        pulled = tl.zeros([TOKENS, CHANNELS], dtype=tl.float32)  # the gradient of w
        for lag in tl.static_range(REACH):
            seen = (start + token + lag >= 0) & (start + token + lag < length)
            there = seen[:, None] & real[None, :]
            g = tl.load(grad + tile + place + lag * width, mask=there, other=0.0).to(tl.float32)
            if GATED:
                q = tl.load(x_tile + at + lag * token_stride, mask=there, other=0.0)
                g *= q.to(tl.float32)
            if SILU:
                u = _filtered(
                    x_tile, history, taps, bias, skip, positions_tile, start, token, channel,
                    length, width, share, token_stride,
                    REACH, lag, GATED, BIAS, SKIP, HISTORY, PACKED,
                )  # fmt: skip
                s = tl.sigmoid(u)
                g *= s + u * s * (1.0 - s)
            if lag == 0:
                now = g
            if PACKED:
                position = tl.load(positions_tile + token + lag, mask=seen, other=0)
                g = tl.where((position >= lag)[:, None], g, 0.0)
            tap = tl.load(taps + channel // share * REACH + lag, mask=real, other=0.0)
            pulled += g * tap.to(tl.float32)[None, :]
        if SKIP:
            pulled += now * tl.load(skip + channel, mask=real, other=0.0).to(tl.float32)[None, :]

        y = tl.zeros([TOKENS, CHANNELS], dtype=tl.float32)  # the sum over the taps, once more
        if PACKED:
            inside = (start + token >= 0) & (start + token < length)
            position = tl.load(positions_tile + token, mask=inside, other=0)
        new = ()
        for lag in tl.static_range(REACH):
            w = gated_input(
                x_tile, history, start, (token - lag)[:, None], channel[None, :], length, width,
                token_stride, REACH - 1, GATED, HISTORY,
            )  # fmt: skip
            if PACKED:
                w = tl.where((position >= lag)[:, None], w, 0.0)
            if GATED:
                tap = tl.load(taps + channel // share * REACH + lag, mask=real, other=0.0)
                y += w * tap.to(tl.float32)[None, :]
            if lag == 0:
                skipped = tl.sum(now * w, axis=0)
                if GATED and SKIP:
                    y += w * tl.load(skip + channel, mask=real, other=0.0).to(tl.float32)[None, :]
            new = new + (sums[lag] + tl.sum(now * w, axis=0),)
        sums = new + (sums[REACH] + tl.sum(now, axis=0), sums[REACH + 1] + skipped)

        kind = grad_x.dtype.element_ty
        if GATED:
            if BIAS:
                y += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
            y *= tl.load(grad + tile + place, mask=here, other=0.0).to(tl.float32)
            k = tl.load(x_tile + at + width, mask=here, other=0.0).to(tl.float32)
            v = tl.load(x_tile + at + 2 * width, mask=here, other=0.0).to(tl.float32)
            to = grad_x + 3 * tile + token[:, None] * (3 * width) + channel[None, :]
            tl.store(to, y.to(kind), mask=here)
            tl.store(to + width, (pulled * v).to(kind), mask=here)
            tl.store(to + 2 * width, (pulled * k).to(kind), mask=here)
        else:
            tl.store(grad_x + tile + place, pulled.to(kind), mask=here)
        if HISTORY:
            kept = start + token + REACH - 1
            before = ((start + token < 0) & (kept >= 0))[:, None] & real[None, :]
            to = grad_history + kept[:, None] * width + channel[None, :]
            tl.store(to, pulled.to(grad_history.dtype.element_ty), mask=before)
    parts = tl.num_programs(0) // blocks
    partial += (row * parts + part) * (REACH + 2) * width
    for number in tl.static_range(REACH + 2):
        tl.store(partial + number * width + channel, sums[number], mask=real)
