"""The Triton programs of modal.py.

A thread has a channel (CHANNELS are a program's) and its MODES states in registers, and walks
along the tokens of a chunk, UNROLL at a time: they are read before the first of them is used, and
written after the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gated_input import gated_input


@triton.jit
def _place(row, chunk, chunks, width, channel, MODES: tl.constexpr):
    """Where the states of a chunk are: [rows, chunks, MODES, width]."""
    mode = tl.arange(0, MODES)[:, None]
    return ((row * chunks + chunk) * MODES + mode) * width + channel[None, :]


@triton.jit
def _goes_on(positions, token, length):
    """1.0, or 0.0 where a document begins."""
    return (tl.load(positions + tl.minimum(token, length - 1)) != 0).to(tl.float32)


@triton.jit
def summaries(
    x, positions, poles, added, length, width, chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to the states, starting from zeros."""
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = (tl.arange(0, MODES)[:, None] >= 0) & (channel < width)[None, :]
    first = chunk * CHUNK
    x += row * row_stride + first.to(tl.int64) * token_stride
    positions += row * length
    decay = tl.load(poles + _place(0, 0, 1, width, channel, MODES), mask=real, other=0.0)
    state = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        inputs = ()
        for step in tl.static_range(UNROLL):
            w = gated_input(
                x,
                x,
                first,
                channel * 0 + start + step,
                channel,
                length,
                width,
                token_stride,
                0,
                GATED,
                False,
            )
            inputs = inputs + (w,)
        for step in tl.static_range(UNROLL):
            if PACKED:
                state *= _goes_on(positions, first + start + step, length)
            state = decay * state + inputs[step][None, :]
    tl.store(added + _place(row, chunk, chunks, width, channel, MODES), state, mask=real)


@triton.jit
def carry(
    states, start, poles, unbroken, end, width, chunks, numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each chunk adds becomes what comes into it; `end` gets what comes out of the last."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < numbers  # MODES · width
    whole = tl.load(poles + at, mask=real, other=0.0)
    power = CHUNK
    while power > 1:
        whole *= whole
        power //= 2
    current = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        current += tl.load(start + row * numbers + at, mask=real, other=0.0)
    for number in range(chunks):
        chunk = number
        if BACKWARD:
            chunk = chunks - 1 - number
        place = (row * chunks + chunk) * numbers + at
        adds = tl.load(states + place, mask=real, other=0.0)
        tl.store(states + place, current, mask=real)
        current = current * whole * tl.load(unbroken + row * chunks + chunk) + adds
    tl.store(end + row * numbers + at, current, mask=real)


@triton.jit
def forward(
    x, positions, poles, residues, skip, states, out, final, length, width, chunks,
    row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, SKIP: tl.constexpr, MODES: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    some = channel < width
    real = (tl.arange(0, MODES)[:, None] >= 0) & some[None, :]
    first = chunk * CHUNK
    x += row * row_stride + first.to(tl.int64) * token_stride
    out += (row * length + first) * width
    positions += row * length
    shared = _place(0, 0, 1, width, channel, MODES)
    decay = tl.load(poles + shared, mask=real, other=0.0)
    weight = tl.load(residues + shared, mask=real, other=0.0)
    state = tl.load(
        states + _place(row, chunk, chunks, width, channel, MODES), mask=real, other=0.0
    )
    through = tl.zeros([CHANNELS], dtype=tl.float32)
    if SKIP:
        through += tl.load(skip + channel, mask=some, other=0.0).to(tl.float32)
    for start in range(0, CHUNK, UNROLL):
        inputs = ()
        gates = ()
        for step in tl.static_range(UNROLL):
            w = gated_input(
                x,
                x,
                first,
                channel * 0 + start + step,
                channel,
                length,
                width,
                token_stride,
                0,
                GATED,
                False,
            )
            inputs = inputs + (w,)
            here = some & (channel * 0 + first + start + step < length)
            q = tl.load(x + (start + step) * token_stride + channel, mask=here, other=0.0)
            gates = gates + (q,)
        outputs = ()
        for step in tl.static_range(UNROLL):
            if PACKED:
                state *= _goes_on(positions, first + start + step, length)
            state = decay * state + inputs[step][None, :]
            if first + start + step == length - 1:
                tl.store(final + _place(row, 0, 1, width, channel, MODES), state, mask=real)
            y = tl.sum(weight * state, axis=0) + through * inputs[step]
            if GATED:
                y *= gates[step].to(tl.float32)
            outputs = outputs + (y,)
        for step in tl.static_range(UNROLL):
            here = some & (channel * 0 + first + start + step < length)
            to = out + (start + step) * width + channel
            tl.store(to, outputs[step].to(out.dtype.element_ty), mask=here)


@triton.jit
def _pulled(grad, x, token, first, channel, length, width, token_stride, GATED: tl.constexpr):
    """The gradient of what stands between the gates."""
    here = (channel < width) & (channel * 0 + first + token < length)
    g = tl.load(grad + token * width + channel, mask=here, other=0.0).to(tl.float32)
    if GATED:
        q = tl.load(x + token * token_stride + channel, mask=here, other=0.0)
        g *= q.to(tl.float32)
    return g


@triton.jit
def backward_summaries(
    grad, grad_final, x, positions, poles, residues, states, slopes, adjoints,
    length, width, chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, MODES: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to the states' derivatives by their poles, which go forward, and to
    the gradients of the states, which go back."""
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = (tl.arange(0, MODES)[:, None] >= 0) & (channel < width)[None, :]
    first = chunk * CHUNK
    x += row * row_stride + first.to(tl.int64) * token_stride
    grad += (row * length + first) * width
    positions += row * length
    shared = _place(0, 0, 1, width, channel, MODES)
    own = _place(row, chunk, chunks, width, channel, MODES)
    decay = tl.load(poles + shared, mask=real, other=0.0)
    state = tl.load(states + own, mask=real, other=0.0)
    slope = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        inputs = ()
        for step in tl.static_range(UNROLL):
            w = gated_input(
                x,
                x,
                first,
                channel * 0 + start + step,
                channel,
                length,
                width,
                token_stride,
                0,
                GATED,
                False,
            )
            inputs = inputs + (w,)
        for step in tl.static_range(UNROLL):
            if PACKED:
                on = _goes_on(positions, first + start + step, length)
                state *= on
                slope *= on
            slope = decay * slope + state
            state = decay * state + inputs[step][None, :]
    tl.store(slopes + own, slope, mask=real)
    weight = tl.load(residues + shared, mask=real, other=0.0)
    adjoint = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        pulls = ()
        for step in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - step
            g = _pulled(grad, x, token, first, channel, length, width, token_stride, GATED)
            pulls = pulls + (g,)
        for step in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - step
            if FINAL:
                if first + token == length - 1:
                    last = grad_final + _place(row, 0, 1, width, channel, MODES)
                    adjoint = tl.load(last, mask=real, other=0.0)
            adjoint = decay * (adjoint + weight * pulls[step][None, :])
            if PACKED:
                adjoint *= _goes_on(positions, first + token, length)
    tl.store(adjoints + own, adjoint, mask=real)


@triton.jit
def backward(
    grad, grad_final, x, positions, poles, residues, skip, states, slopes, adjoints,
    grad_x, partial, grad_skip, length, width, chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, SKIP: tl.constexpr, FINAL: tl.constexpr,
    MODES: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`partial` gets the gradients of the residues, and of the poles after them."""
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    some = channel < width
    real = (tl.arange(0, MODES)[:, None] >= 0) & some[None, :]
    first = chunk * CHUNK
    x += row * row_stride + first.to(tl.int64) * token_stride
    grad += (row * length + first) * width
    grad_x += (row * length + first) * width * (3 if GATED else 1)
    positions += row * length
    shared = _place(0, 0, 1, width, channel, MODES)
    own = _place(row, chunk, chunks, width, channel, MODES)
    decay = tl.load(poles + shared, mask=real, other=0.0)
    weight = tl.load(residues + shared, mask=real, other=0.0)
    state = tl.load(states + own, mask=real, other=0.0)
    slope = tl.load(slopes + own, mask=real, other=0.0)
    of_residues = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    of_poles = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    through = tl.zeros([CHANNELS], dtype=tl.float32)
    of_skip = tl.zeros([CHANNELS], dtype=tl.float32)
    if SKIP:
        through += tl.load(skip + channel, mask=some, other=0.0).to(tl.float32)
    kind = grad_x.dtype.element_ty
    stride = width * (3 if GATED else 1)
    for start in range(0, CHUNK, UNROLL):
        inputs = ()
        pulls = ()
        above = ()
        for step in tl.static_range(UNROLL):
            token = start + step
            w = gated_input(
                x,
                x,
                first,
                channel * 0 + token,
                channel,
                length,
                width,
                token_stride,
                0,
                GATED,
                False,
            )
            inputs = inputs + (w,)
            g = _pulled(grad, x, token, first, channel, length, width, token_stride, GATED)
            pulls = pulls + (g,)
            if GATED:
                here = some & (channel * 0 + first + token < length)
                dy = tl.load(grad + token * width + channel, mask=here, other=0.0)
                above = above + (dy,)
        outputs = ()
        for step in tl.static_range(UNROLL):
            if PACKED:
                on = _goes_on(positions, first + start + step, length)
                state *= on
                slope *= on
            slope = decay * slope + state
            state = decay * state + inputs[step][None, :]
            of_residues += pulls[step][None, :] * state
            of_poles += pulls[step][None, :] * weight * slope
            if FINAL:
                if first + start + step == length - 1:
                    last = grad_final + _place(row, 0, 1, width, channel, MODES)
                    of_poles += tl.load(last, mask=real, other=0.0) * slope
            of_skip += pulls[step] * inputs[step]
            if GATED:
                y = tl.sum(weight * state, axis=0) + through * inputs[step]
                outputs = outputs + (y * above[step].to(tl.float32),)
        if GATED:
            for step in tl.static_range(UNROLL):
                here = some & (channel * 0 + first + start + step < length)
                to = grad_x + (start + step) * stride + channel
                tl.store(to, outputs[step].to(kind), mask=here)
    mode = tl.arange(0, MODES)[:, None]
    sums = partial + ((row * chunks + chunk) * 2 * MODES + mode) * width + channel[None, :]
    tl.store(sums, of_residues, mask=real)
    tl.store(sums + MODES * width, of_poles, mask=real)
    if SKIP:
        tl.store(grad_skip + (row * chunks + chunk) * width + channel, of_skip, mask=some)

    adjoint = tl.load(adjoints + own, mask=real, other=0.0)
    for start in range(0, CHUNK, UNROLL):
        pulls = ()
        keys = ()
        values = ()
        for step in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - step
            here = some & (channel * 0 + first + token < length)
            g = _pulled(grad, x, token, first, channel, length, width, token_stride, GATED)
            pulls = pulls + (g,)
            if GATED:
                at = x + token * token_stride + channel
                keys = keys + (tl.load(at + width, mask=here, other=0.0),)
                values = values + (tl.load(at + 2 * width, mask=here, other=0.0),)
        outputs = ()
        for step in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - step
            if FINAL:
                if first + token == length - 1:
                    last = grad_final + _place(row, 0, 1, width, channel, MODES)
                    adjoint = tl.load(last, mask=real, other=0.0)
            adjoint += weight * pulls[step][None, :]
            outputs = outputs + (tl.sum(adjoint, axis=0) + through * pulls[step],)
            adjoint *= decay
            if PACKED:
                adjoint *= _goes_on(positions, first + token, length)
        for step in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - step
            here = some & (channel * 0 + first + token < length)
            to = grad_x + token * stride + channel
            dw = outputs[step]
            if GATED:
                tl.store(to + width, (dw * values[step].to(tl.float32)).to(kind), mask=here)
                tl.store(to + 2 * width, (dw * keys[step].to(tl.float32)).to(kind), mask=here)
            else:
                tl.store(to, dw.to(kind), mask=here)
