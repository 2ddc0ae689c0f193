"""Triton programs of ssd.py: the steps, and the passes that run forward and backward alike.

A row is cut into chunks of CHUNK tokens, CHUNKS of which are a span. A program walks along the
chunks of one head's span and keeps the state in registers; BACKWARD walks from the end.

total_t is the logarithm of the decay from the chunk's start to t. `carried` is that decay, `fade`
the decay from a token to the chunk's end; across a document's start both are zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selective import softplus


@triton.jit
def steps(
    dt, bias, A_log, steps, totals, length, heads, padded, dt_row, dt_token,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write each token's step Δ = softplus(dt + bias) and its total; zero steps outside the row."""
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    here = (token < length) & (head < heads)
    offset = tl.load(bias + head, mask=head < heads, other=0.0).to(tl.float32)
    step, _ = softplus(dt + row * dt_row, token.to(tl.int64) * dt_token + head, here, offset)
    rate = -tl.exp(tl.load(A_log + head, mask=head < heads, other=0.0).to(tl.float32))
    to = (row * heads + head) * padded + token
    tl.store(steps + to, step, mask=head < heads)
    tl.store(totals + to, tl.cumsum(step * rate, axis=0), mask=head < heads)


@triton.jit
def marks(positions, first, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return, for a chunk's tokens, 1 if a document that began earlier reaches the token, and 1 if
    none begins after it; and 1 if none begins in the chunk."""
    at = tl.arange(0, CHUNK)
    entered = at >= 0
    leaves = at >= 0
    unbroken = 1.0
    if PACKED:
        position = tl.load(positions + first + at, mask=first + at < length, other=1).to(tl.int32)
        latest = tl.max(tl.where(position == 0, at, -1), axis=0)
        entered = position > at
        leaves = at >= latest
        unbroken = (latest < 0).to(tl.float32)
    return entered, leaves, unbroken


@triton.jit
def decays(
    steps, totals, positions, first, length, CHUNK: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Return a chunk's steps, totals, `fade`, `carried`, and the decay over the chunk."""
    at = tl.arange(0, CHUNK)
    step = tl.load(steps + first + at)
    total = tl.load(totals + first + at)
    end = tl.load(totals + first + CHUNK - 1)
    entered, leaves, unbroken = marks(positions, first, length, CHUNK, PACKED)
    fade = tl.where(leaves, tl.exp(end - total), 0.0)
    carried = tl.where(entered, tl.exp(total), 0.0)
    return step, total, fade, carried, tl.exp(end) * unbroken


@triton.jit
def positions_at(positions, first, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return the positions of a chunk's tokens in their documents, if PACKED."""
    at = tl.arange(0, CHUNK)
    if PACKED:
        at = tl.load(positions + first + at, mask=first + at < length, other=0).to(tl.int32)
    return at


@triton.jit
def within(
    total, position, CHUNK: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr
):  # fmt: skip
    """Return [t, s], or [s, t] if BACKWARD: the decay from s to t, tokens of one chunk."""
    at = tl.arange(0, CHUNK)
    ahead = at[:, None] - at[None, :]
    apart = total[:, None] - total[None, :]
    if BACKWARD:
        ahead, apart = -ahead, -apart
    seen = ahead >= 0
    if PACKED:
        if BACKWARD:
            seen = seen & (ahead <= position[None, :])
        else:
            seen = seen & (ahead <= position[:, None])
    return tl.exp(tl.where(seen, apart, float("-inf")))


@triton.jit
def tile(x, stride, first, length, size, CHUNK: tl.constexpr, SIDE: tl.constexpr):
    """Load [CHUNK, SIDE]: a chunk's tokens, zeros outside the row."""
    at = tl.arange(0, CHUNK)[:, None]
    side = tl.arange(0, SIDE)[None, :]
    here = (first + at < length) & (side < size)
    return tl.load(x + first.to(tl.int64) * stride + at * stride + side, mask=here, other=0.0)


@triton.jit
def state_at(states, dim, size, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Return the offsets of a state's numbers, and their mask."""
    row = tl.arange(0, DIM)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    return states + row * size + column, (row < dim) & (column < size)


@triton.jit
def plus(total, a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def summaries(
    x, B, steps, totals, positions, added, keep, length, padded, spans, heads, share, dim, size,
    x_row, x_token, b_row, b_token,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a span's contribution to the state after it; if BACKWARD, with the gradient of y for x
    and C for B, to the gradient of the state before it."""
    span, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind: tl.constexpr = x.dtype.element_ty
    x += row * x_row + head * dim
    B += row * b_row + head // share * size
    steps += (row * heads + head) * padded
    totals += (row * heads + head) * padded
    positions += row * length
    start = span * CHUNKS
    end = tl.minimum(start + CHUNKS, tl.cdiv(length, CHUNK))
    state = tl.zeros([DIM, SIZE], dtype=tl.float32)
    kept = 1.0
    for number in range(start, end):
        first = (start + end - 1 - number if BACKWARD else number) * CHUNK
        step, _, fade, carried, keeps = decays(
            steps, totals, positions, first, length, CHUNK, PACKED
        )
        inputs = tile(x, x_token, first, length, dim, CHUNK, DIM).to(tl.float32)
        into = tile(B, b_token, first, length, size, CHUNK, SIZE)
        weight = carried if BACKWARD else step * fade
        pushed = tl.trans((inputs * weight[:, None]).to(kind))
        state = plus(state * keeps, pushed, into, PRECISION)
        kept *= keeps
    place = (row * spans + span) * heads + head
    to, real = state_at(added + place * dim * size, dim, size, DIM, SIZE)
    tl.store(to, state, mask=real)
    if not BACKWARD:
        tl.store(keep + place, kept)


@triton.jit
def carry(
    added, states, start, keep, end, others, met, spans, heads, numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Scan the spans' contributions `added`. Write the states after the last span to `end` and, if
    WRITE, those at each span's start (BACKWARD: its end) to `states`; if BACKWARD, also a part of
    what passes over the span to `met`: the product with the state at its start, of `others`."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    real = at < numbers
    parts = tl.num_programs(0)
    current = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        current += tl.load(start + (row * heads + head) * numbers + at, mask=real, other=0.0)
    for block in range(tl.cdiv(spans, AHEAD)):
        adds = ()
        keeps = ()
        facing = ()
        for step in tl.static_range(AHEAD):  # all loads before the first use
            number = tl.minimum(block * AHEAD + step, spans - 1)
            span = spans - 1 - number if BACKWARD else number
            place = (row * spans + span) * heads + head
            adds = adds + (tl.load(added + place * numbers + at, mask=real, other=0.0),)
            keeps = keeps + (tl.load(keep + place),)
            if WRITE and BACKWARD:
                facing = facing + (tl.load(others + place * numbers + at, mask=real, other=0.0),)
        for step in tl.static_range(AHEAD):
            number = block * AHEAD + step
            if number < spans:
                if WRITE:
                    span = spans - 1 - number if BACKWARD else number
                    place = (row * spans + span) * heads + head
                    value = current.to(states.dtype.element_ty)
                    tl.store(states + place * numbers + at, value, mask=real)
                    if BACKWARD:
                        product = tl.sum(current * facing[step].to(tl.float32), axis=0)
                        tl.store(met + place * parts + part, product * keeps[step])
                current = current * keeps[step] + adds[step]
    tl.store(end + (row * heads + head) * numbers + at, current, mask=real)


@triton.jit
def outputs(
    x, outof, into, steps, totals, D, positions, states, out,
    length, padded, spans, heads, share, dim, size,
    x_row, x_token, b_row, b_token, out_row, out_token,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write y from x, C and B; if BACKWARD, the gradient of x from that of y, B and C."""
    span, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind: tl.constexpr = x.dtype.element_ty
    x += row * x_row + head * dim
    outof += row * b_row + head // share * size
    into += row * b_row + head // share * size
    out += row * out_row + head * dim
    steps += (row * heads + head) * padded
    totals += (row * heads + head) * padded
    positions += row * length
    place = (row * spans + span) * heads + head
    at, real = state_at(states + place * dim * size, dim, size, DIM, SIZE)
    state = tl.load(at, mask=real, other=0.0).to(tl.float32)
    skip = tl.load(D + head).to(tl.float32)
    start = span * CHUNKS
    end = tl.minimum(start + CHUNKS, tl.cdiv(length, CHUNK))
    for number in range(start, end):
        first = (start + end - 1 - number if BACKWARD else number) * CHUNK
        step, total, fade, carried, keeps = decays(
            steps, totals, positions, first, length, CHUNK, PACKED
        )
        queries = tile(outof, b_token, first, length, size, CHUNK, SIZE)
        keys = tile(into, b_token, first, length, size, CHUNK, SIZE)
        mixing = tl.dot(
            queries, tl.trans(keys), input_precision=PRECISION, out_dtype=tl.float32
        )  # fmt: skip
        position = positions_at(positions, first, length, CHUNK, PACKED)
        mixing *= within(total, position, CHUNK, PACKED, BACKWARD)
        if not BACKWARD:
            mixing *= step[None, :]
        y = tl.dot(
            queries, tl.trans(state.to(kind)), input_precision=PRECISION, out_dtype=tl.float32
        )  # fmt: skip
        y *= (fade if BACKWARD else carried)[:, None]
        inputs = tile(x, x_token, first, length, dim, CHUNK, DIM)
        y = plus(y, mixing.to(kind), inputs, PRECISION)
        if BACKWARD:
            y *= step[:, None]
        y += skip * inputs.to(tl.float32)
        token = tl.arange(0, CHUNK)[:, None]
        channel = tl.arange(0, DIM)[None, :]
        to = out + first.to(tl.int64) * out_token + token * out_token + channel
        here = (first + token < length) & (channel < dim)
        tl.store(to, y.to(out.dtype.element_ty), mask=here)
        weight = carried if BACKWARD else step * fade
        pushed = tl.trans((inputs.to(tl.float32) * weight[:, None]).to(kind))
        state = plus(state * keeps, pushed, keys, PRECISION)
