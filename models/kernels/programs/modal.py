"""The Triton programs of modal.py.

A thread has a channel (CHANNELS are a program's) with the states of its MODES, and walks along the
tokens of a chunk, UNROLL at a time. UNROLL divides the rows' length. A chunk in which a document
begins is `broken`: there it is asked of each token whether one does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .modes import (
    load_modes,
    plus_products,
    products,
    stepped,
    store_modes,
    sum_of_products,
    zeros,
)
from .walk import inputs_of, pulls_of, read, within

# Forward


@triton.jit
def summaries(
    x, positions, unbroken, poles, added, length, width, chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, MODES: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to the states, starting from zeros."""
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < width
    first = chunk.to(tl.int64) * CHUNK
    steps = tl.minimum(CHUNK, length - chunk * CHUNK)
    x += row * row_stride + first * token_stride
    positions += row * length + first
    broken = False
    if PACKED:
        broken = tl.load(unbroken + row * chunks + chunk) == 0
    decay = load_modes(poles, channel, width, MODES)
    state = zeros(MODES, CHANNELS)
    for block in range(steps // UNROLL):
        start = block * UNROLL
        inputs = inputs_of(x, start, steps, channel, real, width, token_stride, GATED, True, UNROLL)
        for step in tl.static_range(UNROLL):
            state = within(state, positions, start + step, broken, MODES)
            state = stepped(decay, state, inputs[step], MODES)
    store_modes(added + (row * chunks + chunk) * MODES * width, state, channel, width, MODES)


@triton.jit
def carry(
    states, start, powers, unbroken, end, chunks, numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """`end` gets what comes out of the last chunk; and, if WRITE, what each chunk adds becomes what
    comes into it. `powers`: λ to the length of a chunk, and to that of the last."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < numbers  # MODES · width
    whole = tl.load(powers + at, mask=real, other=0.0)
    rest = tl.load(powers + numbers + at, mask=real, other=0.0)
    current = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        current += tl.load(start + row * numbers + at, mask=real, other=0.0)
    for block in range(tl.cdiv(chunks, AHEAD)):
        adds = ()
        keeps = ()
        for step in tl.static_range(AHEAD):  # all are read before the first is used
            number = tl.minimum(block * AHEAD + step, chunks - 1)
            chunk = row * chunks + (chunks - 1 - number if BACKWARD else number)
            adds = adds + (tl.load(states + chunk * numbers + at, mask=real, other=0.0),)
            kept = tl.where(chunk == row * chunks + chunks - 1, rest, whole)
            keeps = keeps + (tl.load(unbroken + chunk) * kept,)
        for step in tl.static_range(AHEAD):
            number = block * AHEAD + step
            if number < chunks:
                if WRITE:
                    chunk = row * chunks + (chunks - 1 - number if BACKWARD else number)
                    tl.store(states + chunk * numbers + at, current, mask=real)
                current = current * keeps[step] + adds[step]
    tl.store(end + row * numbers + at, current, mask=real)


@triton.jit
def forward(
    x, positions, unbroken, poles, residues, skip, states, out, length, width, chunks,
    row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, SKIP: tl.constexpr, MODES: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < width
    first = chunk.to(tl.int64) * CHUNK
    steps = tl.minimum(CHUNK, length - chunk * CHUNK)
    x += row * row_stride + first * token_stride
    out += (row * length + first) * width
    positions += row * length + first
    broken = False
    if PACKED:
        broken = tl.load(unbroken + row * chunks + chunk) == 0
    decay = load_modes(poles, channel, width, MODES)
    weight = load_modes(residues, channel, width, MODES)
    through = tl.zeros([CHANNELS], dtype=tl.float32)
    if SKIP:
        through += tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
    state = load_modes(states + (row * chunks + chunk) * MODES * width, channel, width, MODES)
    for block in range(steps // UNROLL):
        start = block * UNROLL
        inputs = inputs_of(x, start, steps, channel, real, width, token_stride, GATED, True, UNROLL)
        gates = inputs
        if GATED:
            gates = read(x, start, steps, channel, real, token_stride, True, UNROLL)
        outputs = ()
        for step in tl.static_range(UNROLL):
            state = within(state, positions, start + step, broken, MODES)
            state = stepped(decay, state, inputs[step], MODES)
            y = sum_of_products(weight, state, MODES) + through * inputs[step]
            if GATED:
                y *= gates[step].to(tl.float32)
            outputs = outputs + (y.to(out.dtype.element_ty),)
        for step in tl.static_range(UNROLL):
            to = out + (start + step) * width + channel
            tl.store(to, outputs[step], mask=channel < width)


# Backward
#
# An adjoint is the gradient of a state. Where nothing but the outputs depends on the states, it is
# R times a sum that all modes have of the same numbers, g_t + λ·(g_{t+1} + …), and that sum is
# what is carried: one operation for each token and mode in place of three. FINAL: the states behind
# the rows have a gradient of their own, and the adjoints themselves are carried, λ included.


@triton.jit
def _adjoint(behind, decay, weight, pull, FINAL: tl.constexpr, MODES: tl.constexpr):
    """Of a token, from what comes from behind it."""
    if FINAL:
        found = plus_products(behind, weight, pull, MODES)
    else:
        found = stepped(decay, behind, pull, MODES)
    return found


@triton.jit
def _before(adjoint, decay, FINAL: tl.constexpr, MODES: tl.constexpr):
    """What goes on to the token before."""
    found = adjoint
    if FINAL:
        found = products(adjoint, decay, MODES)
    return found


@triton.jit
def _of_input(adjoint, weight, FINAL: tl.constexpr, MODES: tl.constexpr):
    """What an input is given by the states that it goes into."""
    if FINAL:
        total = adjoint[0]
        for mode in tl.static_range(1, MODES):
            total += adjoint[mode]
    else:
        total = sum_of_products(adjoint, weight, MODES)
    return total


@triton.jit
def _sloped(decay, slope, state, MODES: tl.constexpr):
    """The derivative of the next state by its pole."""
    found = ()
    for mode in tl.static_range(MODES):
        found = found + (decay[mode] * slope[mode] + state[mode],)
    return found


@triton.jit
def backward_summaries(
    grad, x, positions, unbroken, poles, residues, states, slopes, adjoints,
    length, width, chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, FINAL: tl.constexpr, MODES: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """What each chunk adds to the states' derivatives by their poles, which go forward, and to
    the adjoints, which go back."""
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < width
    first = chunk.to(tl.int64) * CHUNK
    steps = tl.minimum(CHUNK, length - chunk * CHUNK)
    x += row * row_stride + first * token_stride
    grad += (row * length + first) * width
    positions += row * length + first
    broken = False
    if PACKED:
        broken = tl.load(unbroken + row * chunks + chunk) == 0
    own = (row * chunks + chunk) * MODES * width
    decay = load_modes(poles, channel, width, MODES)
    state = load_modes(states + own, channel, width, MODES)
    slope = zeros(MODES, CHANNELS)
    for block in range(steps // UNROLL):
        start = block * UNROLL
        inputs = inputs_of(x, start, steps, channel, real, width, token_stride, GATED, True, UNROLL)
        for step in tl.static_range(UNROLL):
            state = within(state, positions, start + step, broken, MODES)
            slope = within(slope, positions, start + step, broken, MODES)
            slope = _sloped(decay, slope, state, MODES)
            state = stepped(decay, state, inputs[step], MODES)
    store_modes(slopes + own, slope, channel, width, MODES)
    weight = decay
    if FINAL:
        weight = load_modes(residues, channel, width, MODES)
    adjoint = zeros(MODES, CHANNELS)
    for block in range(steps // UNROLL):
        start = steps - (block + 1) * UNROLL
        pulls = pulls_of(
            grad, x, start, steps, channel, real, width, token_stride, GATED, True, UNROLL
        )
        for step in tl.static_range(UNROLL - 1, -1, -1):
            adjoint = _adjoint(adjoint, decay, weight, pulls[step], FINAL, MODES)
            adjoint = _before(adjoint, decay, FINAL, MODES)
            adjoint = within(adjoint, positions, start + step, broken, MODES)
    store_modes(adjoints + own, adjoint, channel, width, MODES)


@triton.jit
def backward(
    grad, x, positions, unbroken, poles, residues, skip, states, slopes, adjoints,
    grad_x, partial, length, width, chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, SKIP: tl.constexpr, FINAL: tl.constexpr,
    MODES: tl.constexpr, CHUNK: tl.constexpr, UNROLL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`partial` gets the gradients of the residues, of the poles, and of the skip."""
    row = tl.program_id(2).to(tl.int64)
    chunk = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < width
    first = chunk.to(tl.int64) * CHUNK
    steps = tl.minimum(CHUNK, length - chunk * CHUNK)
    x += row * row_stride + first * token_stride
    grad += (row * length + first) * width
    grad_x += (row * length + first) * width * (3 if GATED else 1)
    positions += row * length + first
    partial += (row * chunks + chunk) * (2 * MODES + 1) * width
    broken = False
    if PACKED:
        broken = tl.load(unbroken + row * chunks + chunk) == 0
    own = (row * chunks + chunk) * MODES * width
    kind = grad_x.dtype.element_ty
    decay = load_modes(poles, channel, width, MODES)
    weight = load_modes(residues, channel, width, MODES)
    through = tl.zeros([CHANNELS], dtype=tl.float32)
    if SKIP:
        through += tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)

    state = load_modes(states + own, channel, width, MODES)
    slope = load_modes(slopes + own, channel, width, MODES)
    of_residues = zeros(MODES, CHANNELS)
    of_poles = zeros(MODES, CHANNELS)
    of_skip = tl.zeros([CHANNELS], dtype=tl.float32)
    for block in range(steps // UNROLL):
        start = block * UNROLL
        inputs = inputs_of(x, start, steps, channel, real, width, token_stride, GATED, True, UNROLL)
        above = read(grad, start, steps, channel, real, width, True, UNROLL)
        gates = inputs
        if GATED:
            gates = read(x, start, steps, channel, real, token_stride, True, UNROLL)
        outputs = ()
        for step in tl.static_range(UNROLL):
            state = within(state, positions, start + step, broken, MODES)
            slope = within(slope, positions, start + step, broken, MODES)
            slope = _sloped(decay, slope, state, MODES)
            state = stepped(decay, state, inputs[step], MODES)
            pull = above[step].to(tl.float32)
            if GATED:
                y = sum_of_products(weight, state, MODES) + through * inputs[step]
                outputs = outputs + ((y * pull).to(kind),)
                pull *= gates[step].to(tl.float32)
            of_residues = plus_products(of_residues, state, pull, MODES)
            of_poles = plus_products(of_poles, slope, pull, MODES)
            of_skip += pull * inputs[step]
        if GATED:
            for step in tl.static_range(UNROLL):
                to = grad_x + (start + step) * (3 * width) + channel
                tl.store(to, outputs[step], mask=channel < width)
    store_modes(partial, of_residues, channel, width, MODES)
    of_poles = products(of_poles, weight, MODES)
    store_modes(partial + MODES * width, of_poles, channel, width, MODES)
    tl.store(partial + 2 * MODES * width + channel, of_skip, mask=channel < width)

    adjoint = load_modes(adjoints + own, channel, width, MODES)
    for block in range(steps // UNROLL):
        start = steps - (block + 1) * UNROLL
        pulls = pulls_of(
            grad, x, start, steps, channel, real, width, token_stride, GATED, True, UNROLL
        )
        keys = pulls
        values = pulls
        if GATED:
            keys = read(x + width, start, steps, channel, real, token_stride, True, UNROLL)
            values = read(x + 2 * width, start, steps, channel, real, token_stride, True, UNROLL)
        for step in tl.static_range(UNROLL - 1, -1, -1):
            adjoint = _adjoint(adjoint, decay, weight, pulls[step], FINAL, MODES)
            dw = through * pulls[step] + _of_input(adjoint, weight, FINAL, MODES)
            if GATED:
                to = grad_x + (start + step) * (3 * width) + channel
                of_k = (dw * values[step].to(tl.float32)).to(kind)
                tl.store(to + width, of_k, mask=channel < width)
                of_v = (dw * keys[step].to(tl.float32)).to(kind)
                tl.store(to + 2 * width, of_v, mask=channel < width)
            else:
                to = grad_x + (start + step) * width + channel
                tl.store(to, dw.to(kind), mask=channel < width)
            adjoint = _before(adjoint, decay, FINAL, MODES)
            adjoint = within(adjoint, positions, start + step, broken, MODES)
