"""Triton programs of short_convolution.py.

A thread holds a few channels (CHANNELS a program) and filters a span of tokens, UNROLL at a time.
It keeps the last REACH inputs in registers, and backward also as many unfinished gradients of
inputs; everything is read and written once. A block of tokens is processed with CARE (masks) where
a document begins within reach of the span, or tokens or channels are missing; elsewhere without.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .walk import add_products, load_earlier_input, load_inputs, load_tokens, token_mask, zero_sums


@triton.jit
def _place(length, width, SPAN: tl.constexpr, CHANNELS: tl.constexpr):
    """Return a program's first token, row, first channel, and its span's number in all rows."""
    blocks = tl.cdiv(width, CHANNELS)
    span = tl.program_id(0) // blocks
    spans = tl.cdiv(length, SPAN)
    first = tl.program_id(0) % blocks * CHANNELS
    return span % spans * SPAN, (span // spans).to(tl.int64), first, span.to(tl.int64)


@triton.jit
def _taps(taps, skip, channel, width, share, REACH: tl.constexpr, SKIP: tl.constexpr):
    """Load the taps of each channel; the skip is added to the first."""
    found = ()
    for lag in tl.static_range(REACH):
        place = taps + channel // share * REACH + lag
        tap = tl.load(place, mask=channel < width, other=0.0).to(tl.float32)
        if SKIP and lag == 0:
            tap += tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
        found = found + (tap,)
    return found


@triton.jit
def _breaks(positions, end, REACH: tl.constexpr, SPAN: tl.constexpr):
    """Return true if a document begins within reach of the span or of the tokens after it."""
    token = tl.arange(0, 2 * SPAN)
    here = (token < end) & (token < SPAN + REACH - 1)
    position = tl.load(positions + token, mask=here, other=REACH)
    return tl.min(position, axis=0) < REACH - 1


@triton.jit
def _behind(
    x, history, positions, start, channel, length, width, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Load the inputs before a span that its first token sees, latest first; zeros elsewhere."""
    found = ()
    for lag in tl.static_range(1, REACH):
        w = load_earlier_input(
            x, history, start, channel * 0 - lag, channel, length, width, token_stride, REACH - 1,
            GATED, HISTORY,
        )  # fmt: skip
        if PACKED:
            w = tl.where(tl.load(positions) >= lag, w, 0.0)
        found = found + (w,)
    return found + (channel.to(tl.float32) * 0.0,)


@triton.jit
def _shifted(window, w, positions, token, CARE: tl.constexpr, REACH: tl.constexpr):
    """Return the window of the next token: w, and the earlier inputs that it sees."""
    found = (w,)
    for lag in tl.static_range(1, REACH):
        found = found + (window[lag - 1],)
    if CARE and positions is not None:
        position = tl.load(positions + token)
        kept = (w,)
        for lag in tl.static_range(1, REACH):
            kept = kept + (tl.where(position >= lag, found[lag], 0.0),)
        found = kept
    return found


@triton.jit
def _filtered(window, taps, REACH: tl.constexpr):
    y = window[0] * taps[0]
    for lag in tl.static_range(1, REACH):
        y += window[lag] * taps[lag]
    return y


@triton.jit
def _spread(pulled, taps, g, positions, token, CARE: tl.constexpr, REACH: tl.constexpr):
    """Add a new output's gradient g to the gradients of the last inputs, latest first."""
    found = (taps[0] * g,)
    for lag in tl.static_range(1, REACH):
        seen = g
        if CARE and positions is not None:
            seen = tl.where(tl.load(positions + token) >= lag, g, 0.0)
        found = found + (pulled[lag - 1] + taps[lag] * seen,)
    return found


@triton.jit
def _put(to, value, token_mask, CARE: tl.constexpr):
    if CARE:
        tl.store(to, value.to(to.dtype.element_ty), mask=token_mask)
    else:
        tl.store(to, value.to(to.dtype.element_ty))


@triton.jit
def _forward_block(
    x, positions, out, window, taps, offset, first, end, channel, width, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, UNROLL: tl.constexpr,
    CARE: tl.constexpr,
):  # fmt: skip
    """Write UNROLL outputs; return the window of the last."""
    real = None
    if CARE:
        real = channel < width
    inputs = load_inputs(x, first, end, channel, real, width, token_stride, GATED, not CARE, UNROLL)
    gates = inputs
    if GATED:
        gates = load_tokens(x, first, end, channel, real, token_stride, not CARE, UNROLL)
    for step in tl.static_range(UNROLL):
        token = first + step
        window = _shifted(window, inputs[step], positions, tl.minimum(token, end - 1), CARE, REACH)
        y = _filtered(window, taps, REACH) + offset
        if SILU:
            y *= tl.sigmoid(y)
        if GATED:
            y *= gates[step].to(tl.float32)
        here = token_mask(token, 0, end, channel, width)
        _put(out + token * width + channel, y, here, CARE)
    return window


@triton.jit
def short_convolution_forward(
    x, history, taps, bias, skip, positions, out, length, width, share, row_stride, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
    SPAN: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    start, row, first_channel, _ = _place(length, width, SPAN, CHANNELS)
    channel = first_channel + tl.arange(0, CHANNELS)
    end = length - start
    x += row * row_stride + start.to(tl.int64) * token_stride
    out += (row * length + start) * width
    care = first_channel + CHANNELS > width
    where = None
    if PACKED:
        where = positions + row * length + start
        care = care | _breaks(where, end, REACH, SPAN)
    taps = _taps(taps, skip, channel, width, share, REACH, SKIP)
    offset = tl.zeros([CHANNELS], dtype=tl.float32)
    if BIAS:
        offset += tl.load(bias + channel, mask=channel < width, other=0.0).to(tl.float32)
    window = _behind(
        x, history + row * (REACH - 1) * width, where, start, channel, length, width,
        token_stride, REACH, GATED, HISTORY, PACKED,
    )  # fmt: skip
    for block in range(tl.cdiv(tl.minimum(SPAN, end), UNROLL)):
        first = block * UNROLL
        if care | (first + UNROLL > end):
            window = _forward_block(
                x, where, out, window, taps, offset, first, end, channel, width, token_stride,
                REACH, GATED, SILU, UNROLL, True,
            )  # fmt: skip
        else:
            window = _forward_block(
                x, where, out, window, taps, offset, first, end, channel, width, token_stride,
                REACH, GATED, SILU, UNROLL, False,
            )  # fmt: skip


@triton.jit
def _backward_block(
    grad, x, positions, grad_x, grad_history, window, pulled, of_taps, of_bias, taps, offset, first,
    start, end, last, channel, width, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, HISTORY: tl.constexpr,
    UNROLL: tl.constexpr, CARE: tl.constexpr,
):  # fmt: skip
    """Read UNROLL gradients and finish as many; return the unfinished ones."""
    real = None
    if CARE:
        real = channel < width
    inputs = load_inputs(x, first, end, channel, real, width, token_stride, GATED, not CARE, UNROLL)
    above = load_tokens(grad, first, end, channel, real, width, not CARE, UNROLL)
    gates = above
    keys = above
    values = above
    if GATED:
        gates = load_tokens(x, first, end, channel, real, token_stride, not CARE, UNROLL)
        done = first - REACH + 1  # finished in this block
        keys = load_tokens(x + width, done, last, channel, real, token_stride, not CARE, UNROLL)
        values = load_tokens(
            x + 2 * width, done, last, channel, real, token_stride, not CARE, UNROLL
        )
    for step in tl.static_range(UNROLL):
        token = first + step
        at = tl.minimum(token, end - 1)
        window = _shifted(window, inputs[step], positions, at, CARE, REACH)
        g = above[step].to(tl.float32)
        here = token_mask(token, 0, last, channel, width)
        if GATED or SILU:
            y = _filtered(window, taps, REACH) + offset
            open_ = tl.sigmoid(y)
            if GATED:
                of_q = g * (y * open_ if SILU else y)
                _put(grad_x + token * 3 * width + channel, of_q, here, CARE)
                g *= gates[step].to(tl.float32)
            if SILU:
                g *= open_ + y * open_ * (1.0 - open_)
        own = g
        if CARE:
            g = tl.where(token_mask(token, 0, end, channel, width), g, 0.0)
            own = tl.where(here, g, 0.0)
        of_taps = add_products(of_taps, window, own, REACH)
        of_bias += own
        pulled = _spread(pulled, taps, g, positions, at, CARE, REACH)

        token = first + step - REACH + 1  # finished now
        dw = pulled[REACH - 1]
        here = token_mask(token, 0, last, channel, width)
        if GATED:
            to = grad_x + token * 3 * width + channel
            _put(to + width, dw * values[step].to(tl.float32), here, CARE)
            _put(to + 2 * width, dw * keys[step].to(tl.float32), here, CARE)
        else:
            _put(grad_x + token * width + channel, dw, here, CARE)
        if HISTORY and CARE:
            before = token_mask(token + start, 1 - REACH, -start, channel, width)
            _put(grad_history + (token + REACH - 1) * width + channel, dw, before, True)
    return window, pulled, of_taps, of_bias


@triton.jit
def short_convolution_backward(
    grad, x, history, taps, bias, skip, positions, grad_x, grad_history, partial,
    length, width, share, row_stride, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
    SPAN: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the inputs, and to `partial` a span's sums for taps and bias.

    With g the gradient of the sum over the taps, the gradient of w[s] is Σ_j h[j]·g[s+j], that of
    h[j] is Σ_t g[t]·w[t−j]. So a span reads REACH − 1 tokens beyond its end.
    """
    start, row, first_channel, span = _place(length, width, SPAN, CHANNELS)
    channel = first_channel + tl.arange(0, CHANNELS)
    end = length - start
    last = tl.minimum(SPAN, end)
    x += row * row_stride + start.to(tl.int64) * token_stride
    grad += (row * length + start) * width
    grad_x += (row * length + start) * width * (3 if GATED else 1)
    grad_history += row * (REACH - 1) * width
    partial += span * (REACH + 1) * width
    care = first_channel + CHANNELS > width
    where = None
    if PACKED:
        where = positions + row * length + start
        care = care | _breaks(where, end, REACH, SPAN)
    taps = _taps(taps, skip, channel, width, share, REACH, SKIP)
    offset = tl.zeros([CHANNELS], dtype=tl.float32)
    if BIAS:
        offset += tl.load(bias + channel, mask=channel < width, other=0.0).to(tl.float32)
    window = _behind(
        x, history + row * (REACH - 1) * width, where, start, channel, length, width,
        token_stride, REACH, GATED, HISTORY, PACKED,
    )  # fmt: skip
    pulled = zero_sums(REACH, CHANNELS)
    of_taps = zero_sums(REACH, CHANNELS)
    of_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    for block in range(tl.cdiv(last + REACH - 1, UNROLL)):
        first = block * UNROLL
        if care | (first < REACH - 1) | (first + UNROLL > last):
            window, pulled, of_taps, of_bias = _backward_block(
                grad, x, where, grad_x, grad_history, window, pulled, of_taps, of_bias, taps,
                offset, first, start, end, last, channel, width, token_stride,
                REACH, GATED, SILU, HISTORY, UNROLL, True,
            )  # fmt: skip
        else:
            window, pulled, of_taps, of_bias = _backward_block(
                grad, x, where, grad_x, grad_history, window, pulled, of_taps, of_bias, taps,
                offset, first, start, end, last, channel, width, token_stride,
                REACH, GATED, SILU, HISTORY, UNROLL, False,
            )  # fmt: skip
    for lag in tl.static_range(REACH):
        tl.store(partial + lag * width + channel, of_taps[lag], mask=channel < width)
    tl.store(partial + REACH * width + channel, of_bias, mask=channel < width)
