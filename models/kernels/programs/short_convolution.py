"""Triton programs for short_convolution.py.

A thread holds a few channels (CHANNELS a program) and filters a token span, in blocks of UNROLL. It
keeps the last REACH inputs in registers, and backward also as many unfinished input gradients;
everything is read and written once.

A block has masks (CARE) where a document begins within its reach, or tokens or channels are
missing. Such blocks are few: their tokens are a loop, which keeps the program small.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .walk import add_products, load_earlier_input, load_inputs, load_tokens, token_mask, zero_sums


@triton.jit
def _program_span(length, width, SPAN: tl.constexpr, CHANNELS: tl.constexpr):
    """Return a program's first token, row, first channel, and its span's number in all rows."""
    num_blocks = tl.cdiv(width, CHANNELS)
    span = tl.program_id(0) // num_blocks
    num_spans = tl.cdiv(length, SPAN)
    first_channel = tl.program_id(0) % num_blocks * CHANNELS
    return (
        span % num_spans * SPAN,
        (span // num_spans).to(tl.int64),
        first_channel,
        span.to(tl.int64),
    )


@triton.jit
def _load_taps(
    taps, skip, channel, width, channels_per_group, REACH: tl.constexpr, SKIP: tl.constexpr
):
    """Load each channel's taps, latest token first; the skip is added to the first."""
    loaded = ()
    for lag in tl.static_range(REACH):
        ptrs = taps + channel // channels_per_group * REACH + lag
        tap = tl.load(ptrs, mask=channel < width, other=0.0).to(tl.float32)
        if SKIP and lag == 0:
            tap += tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
        loaded = loaded + (tap,)
    return loaded


@triton.jit
def _load_last_position(positions, first, end, UNROLL: tl.constexpr, PACKED: tl.constexpr):
    """Return the document position of a block's last token."""
    position = first
    if PACKED:
        position = tl.load(positions + tl.minimum(first + UNROLL, end) - 1).to(tl.int32)
    return position


@triton.jit
def _load_window(
    x, history, positions, start, channel, length, width, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Load the inputs before a span that its first token sees, latest first; zeros elsewhere."""
    window = ()
    for lag in tl.static_range(1, REACH):
        w = load_earlier_input(
            x, history, start, channel * 0 - lag, channel, length, width, token_stride, REACH - 1,
            GATED, HISTORY,
        )  # fmt: skip
        if PACKED:
            w = tl.where(tl.load(positions) >= lag, w, 0.0)
        window = window + (w,)
    return window + (channel.to(tl.float32) * 0.0,)


@triton.jit
def _shifted(window, w, positions, token, CARE: tl.constexpr, REACH: tl.constexpr):
    """Return the next token's window: w, and the earlier inputs that it sees."""
    shifted = (w,)
    for lag in tl.static_range(1, REACH):
        shifted = shifted + (window[lag - 1],)
    if CARE and positions is not None:
        position = tl.load(positions + token)
        visible = (w,)
        for lag in tl.static_range(1, REACH):
            visible = visible + (tl.where(position >= lag, shifted[lag], 0.0),)
        shifted = visible
    return shifted


@triton.jit
def _filter_window(window, taps, REACH: tl.constexpr):
    """Return Σ_lag taps[lag] · window[lag]."""
    y = window[0] * taps[0]
    for lag in tl.static_range(1, REACH):
        y += window[lag] * taps[lag]
    return y


@triton.jit
def _add_output_grad(
    input_grads, taps, output_grad, positions, token, CARE: tl.constexpr, REACH: tl.constexpr
):
    """Add an output's gradient to the gradients of the REACH inputs that it reads, latest first."""
    new_grads = (taps[0] * output_grad,)
    for lag in tl.static_range(1, REACH):
        visible_grad = output_grad
        if CARE and positions is not None:
            visible_grad = tl.where(tl.load(positions + token) >= lag, output_grad, 0.0)
        new_grads = new_grads + (input_grads[lag - 1] + taps[lag] * visible_grad,)
    return new_grads


@triton.jit
def _store(ptr, value, mask, CARE: tl.constexpr):
    """Store a value, masked only with CARE."""
    if CARE:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(ptr, value.to(ptr.dtype.element_ty))


@triton.jit
def _forward_block(
    x, positions, out, window, taps, bias, first, end, channel, width, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, UNROLL: tl.constexpr,
    CARE: tl.constexpr,
):  # fmt: skip
    """Write UNROLL outputs; return the last token's window."""
    channel_mask = None
    if CARE:
        channel_mask = channel < width
    inputs = load_inputs(
        x, first, end, channel, channel_mask, width, token_stride, GATED, not CARE, UNROLL
    )
    gates = inputs
    if GATED:
        gates = load_tokens(x, first, end, channel, channel_mask, token_stride, not CARE, UNROLL)
    for index in tl.static_range(UNROLL):
        token = first + index
        window = _shifted(window, inputs[index], positions, tl.minimum(token, end - 1), CARE, REACH)
        y = _filter_window(window, taps, REACH) + bias
        if SILU:
            y *= tl.sigmoid(y)
        if GATED:
            y *= gates[index].to(tl.float32)
        mask = token_mask(token, 0, end, channel, width)
        _store(out + token * width + channel, y, mask, CARE)
    return window


@triton.jit
def short_convolution_forward(
    x, history, taps, bias, skip, positions, out, length, width, channels_per_group, row_stride,
    token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr,
    UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y_t = q_t ⊙ act(Σ_{j<REACH} h[j]·w_{t−j} + bias + skip·w_t),  w = k ⊙ v.

    Without GATED, w is x and there is no q; act is SiLU or the identity.
    """
    start, row, first_channel, _ = _program_span(length, width, SPAN, CHANNELS)
    channel = first_channel + tl.arange(0, CHANNELS)
    end = length - start
    x += row * row_stride + start.to(tl.int64) * token_stride
    out += (row * length + start) * width
    span_positions = None
    if PACKED:
        span_positions = positions + row * length + start
    taps = _load_taps(taps, skip, channel, width, channels_per_group, REACH, SKIP)
    channel_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    if BIAS:
        channel_bias += tl.load(bias + channel, mask=channel < width, other=0.0).to(tl.float32)
    window = _load_window(
        x, history + row * (REACH - 1) * width, span_positions, start, channel, length, width,
        token_stride, REACH, GATED, HISTORY, PACKED,
    )  # fmt: skip
    last_position = _load_last_position(span_positions, 0, end, UNROLL, PACKED)
    for block in range(tl.cdiv(tl.minimum(SPAN, end), UNROLL)):
        first = block * UNROLL
        care = (first_channel + CHANNELS > width) | (first + UNROLL > end)
        if PACKED:  # a document begins within reach of the block
            care = care | (last_position < UNROLL + REACH - 2)
        # The next block's: nothing waits for it now.
        last_position = _load_last_position(span_positions, first + UNROLL, end, UNROLL, PACKED)
        if care:
            for token in range(first, first + UNROLL):
                window = _forward_block(
                    x, span_positions, out, window, taps, channel_bias, token, end, channel, width,
                    token_stride, REACH, GATED, SILU, 1, True,
                )  # fmt: skip
        else:
            window = _forward_block(
                x, span_positions, out, window, taps, channel_bias, first, end, channel, width,
                token_stride, REACH, GATED, SILU, UNROLL, False,
            )  # fmt: skip


@triton.jit
def _backward_block(
    dy, x, positions, grad_x, grad_history, window, input_grads, tap_grads, bias_grad, taps, bias,
    first, start, end, span_end, channel, width, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, HISTORY: tl.constexpr,
    UNROLL: tl.constexpr, CARE: tl.constexpr,
):  # fmt: skip
    """Read UNROLL gradients and finish as many; return the unfinished ones."""
    channel_mask = None
    if CARE:
        channel_mask = channel < width
    inputs = load_inputs(
        x, first, end, channel, channel_mask, width, token_stride, GATED, not CARE, UNROLL
    )
    dy_values = load_tokens(dy, first, end, channel, channel_mask, width, not CARE, UNROLL)
    gates = dy_values
    keys = dy_values
    values = dy_values
    if GATED:
        gates = load_tokens(x, first, end, channel, channel_mask, token_stride, not CARE, UNROLL)
        first_finished = first - REACH + 1  # finished in this block
        keys = load_tokens(
            x + width, first_finished, span_end, channel, channel_mask, token_stride, not CARE,
            UNROLL,
        )  # fmt: skip
        values = load_tokens(
            x + 2 * width, first_finished, span_end, channel, channel_mask, token_stride, not CARE,
            UNROLL,
        )  # fmt: skip
    for index in tl.static_range(UNROLL):
        token = first + index
        position_token = tl.minimum(token, end - 1)
        window = _shifted(window, inputs[index], positions, position_token, CARE, REACH)
        grad = dy_values[index].to(tl.float32)
        mask = token_mask(token, 0, span_end, channel, width)
        if GATED or SILU:
            y = _filter_window(window, taps, REACH) + bias
            sigmoid = tl.sigmoid(y)
            if GATED:
                q_grad = grad * (y * sigmoid if SILU else y)
                _store(grad_x + token * 3 * width + channel, q_grad, mask, CARE)
                grad *= gates[index].to(tl.float32)
            if SILU:
                grad *= sigmoid + y * sigmoid * (1.0 - sigmoid)
        span_grad = grad
        if CARE:
            grad = tl.where(token_mask(token, 0, end, channel, width), grad, 0.0)
            span_grad = tl.where(mask, grad, 0.0)
        tap_grads = add_products(tap_grads, window, span_grad, REACH)
        bias_grad += span_grad
        input_grads = _add_output_grad(
            input_grads, taps, grad, positions, position_token, CARE, REACH
        )

        token = first + index - REACH + 1  # finished now
        dw = input_grads[REACH - 1]
        mask = token_mask(token, 0, span_end, channel, width)
        if GATED:
            grad_ptrs = grad_x + token * 3 * width + channel
            _store(grad_ptrs + width, dw * values[index].to(tl.float32), mask, CARE)
            _store(grad_ptrs + 2 * width, dw * keys[index].to(tl.float32), mask, CARE)
        else:
            _store(grad_x + token * width + channel, dw, mask, CARE)
        if HISTORY and CARE:
            history_mask = token_mask(token + start, 1 - REACH, -start, channel, width)
            _store(grad_history + (token + REACH - 1) * width + channel, dw, history_mask, True)
    return window, input_grads, tap_grads, bias_grad


@triton.jit
def short_convolution_backward(
    dy, x, history, taps, bias, skip, positions, grad_x, grad_history, param_grads, length, width,
    channels_per_group, row_stride, token_stride,
    REACH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr,
    UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dw_s = Σ_j h[j]·g_{s+j},  dh[j] = Σ_t g_t·w_{t−j},  dbias = Σ_t g_t.

    g_t = dy_t ⊙ q_t ⊙ act' is the gradient for the sum over the taps, so a span reads REACH − 1
    tokens beyond its end. GATED: dq = dy ⊙ act, dk = dw ⊙ v, dv = dw ⊙ k. `param_grads` holds
    per-span sums: REACH rows for the taps, and one for the bias.
    """
    start, row, first_channel, span = _program_span(length, width, SPAN, CHANNELS)
    channel = first_channel + tl.arange(0, CHANNELS)
    end = length - start
    span_end = tl.minimum(SPAN, end)
    x += row * row_stride + start.to(tl.int64) * token_stride
    dy += (row * length + start) * width
    grad_x += (row * length + start) * width * (3 if GATED else 1)
    grad_history += row * (REACH - 1) * width
    param_grads += span * (REACH + 1) * width
    span_positions = None
    if PACKED:
        span_positions = positions + row * length + start
    taps = _load_taps(taps, skip, channel, width, channels_per_group, REACH, SKIP)
    channel_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    if BIAS:
        channel_bias += tl.load(bias + channel, mask=channel < width, other=0.0).to(tl.float32)
    window = _load_window(
        x, history + row * (REACH - 1) * width, span_positions, start, channel, length, width,
        token_stride, REACH, GATED, HISTORY, PACKED,
    )  # fmt: skip
    input_grads = zero_sums(REACH, CHANNELS)
    tap_grads = zero_sums(REACH, CHANNELS)
    bias_grad = tl.zeros([CHANNELS], dtype=tl.float32)
    last_position = _load_last_position(span_positions, 0, end, UNROLL, PACKED)
    for block in range(tl.cdiv(span_end + REACH - 1, UNROLL)):
        first = block * UNROLL
        care = (first_channel + CHANNELS > width) | (first + UNROLL > span_end)
        care = care | (first < REACH - 1)
        if PACKED:  # a document begins within reach of the block
            care = care | (last_position < UNROLL + REACH - 2)
        # The next block's: nothing waits for it now.
        last_position = _load_last_position(span_positions, first + UNROLL, end, UNROLL, PACKED)
        if care:
            for token in range(first, first + UNROLL):
                window, input_grads, tap_grads, bias_grad = _backward_block(
                    dy, x, span_positions, grad_x, grad_history, window, input_grads, tap_grads,
                    bias_grad, taps, channel_bias, token, start, end, span_end, channel, width,
                    token_stride, REACH, GATED, SILU, HISTORY, 1, True,
                )  # fmt: skip
        else:
            window, input_grads, tap_grads, bias_grad = _backward_block(
                dy, x, span_positions, grad_x, grad_history, window, input_grads, tap_grads,
                bias_grad, taps, channel_bias, first, start, end, span_end, channel, width,
                token_stride, REACH, GATED, SILU, HISTORY, UNROLL, False,
            )  # fmt: skip
    for lag in tl.static_range(REACH):
        tl.store(param_grads + lag * width + channel, tap_grads[lag], mask=channel < width)
    tl.store(param_grads + REACH * width + channel, bias_grad, mask=channel < width)
