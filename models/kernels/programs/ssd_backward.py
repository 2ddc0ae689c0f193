"""Triton programs of ssd.py's backward pass: the gradients of B, C, dt, A and D.

B and C belong to groups of heads. A program sums over HEADS heads of a group: `pairs` the gradients
of C_t·B_s, for pairs of tokens of a span, and `shared` what they and the states at the span's
boundary contribute to the gradients of B and C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selective import softplus
from .ssd import marks, plus, positions_at, state_at, tile, within


@triton.jit
def _between(totals, start, low, high, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the decay over the chunks of a span between two others."""
    chunk = start + tl.arange(0, CHUNKS)
    ends = totals + chunk * CHUNK + CHUNK - 1
    return tl.exp(tl.sum(tl.load(ends, mask=(chunk > low) & (chunk < high), other=0.0), axis=0))


@triton.jit
def _reach(totals, first, mark, LATER: tl.constexpr, CHUNK: tl.constexpr):
    """Return the decay from a chunk's start to its tokens; if LATER, from them to its end."""
    total = tl.load(totals + first + tl.arange(0, CHUNK))
    if LATER:
        total = tl.load(totals + first + CHUNK - 1) - total
    return tl.where(mark, tl.exp(total), 0.0)


@triton.jit
def pairs(
    grad, x, B, C, steps, totals, positions, outs, directs, of_D, weights,
    length, padded, heads, share, dim, size, grad_row, grad_token, x_row, x_token,
    SAME: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of C_t·B_s for a chunk's tokens t and tokens s of the same chunk (SAME)
    or of an earlier one of the span, summed over HEADS heads.

    The product of a pair is that of the gradient of y at t and what x at s adds to y. For each
    head, `directs` receives its sums over t, divided by the step, and `outs` those over s; if SAME,
    `outs` receives the sum over all pairs around a token, and `of_D` its part of D's gradient.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    kind: tl.constexpr = x.dtype.element_ty
    distance = 0 if SAME else tl.program_id(1) % (CHUNKS - 1) + 1
    block = tl.program_id(1) if SAME else tl.program_id(1) // (CHUNKS - 1)
    blocks = heads // HEADS
    head = block * HEADS
    grad += row * grad_row + head * dim
    x += row * x_row + head * dim
    B += row * x_row + head // share * size
    C += row * x_row + head // share * size
    positions += row * length
    steps += (row * heads + head) * padded
    totals += (row * heads + head) * padded
    of_D += (row * heads + head) * padded
    outs += ((row * CHUNKS + distance) * heads + head) * padded
    directs += ((row * CHUNKS + distance) * heads + head) * padded
    start = chunk // CHUNKS * CHUNKS
    earlier = chunk - distance
    at = tl.arange(0, CHUNK)
    if earlier >= start:
        first, there = chunk * CHUNK, earlier * CHUNK
        scores = tl.dot(
            tile(C, x_token, first, length, size, CHUNK, SIZE),
            tl.trans(tile(B, x_token, there, length, size, CHUNK, SIZE)),
            input_precision=PRECISION, out_dtype=tl.float32,
        )  # fmt: skip
        entered, _, _ = marks(positions, first, length, CHUNK, PACKED)
        _, leaves, _ = marks(positions, there, length, CHUNK, PACKED)
        open_ = _open(positions, earlier + 1, chunk, length, CHUNK, PACKED)
        position = positions_at(positions, first, length, CHUNK, PACKED)
        summed = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        for number in range(HEADS):
            of_head = number * padded
            above = tile(grad + number * dim, grad_token, first, length, dim, CHUNK, DIM)
            inputs = tile(x + number * dim, x_token, there, length, dim, CHUNK, DIM)
            met = tl.dot(above, tl.trans(inputs), input_precision=PRECISION, out_dtype=tl.float32)
            if SAME:
                diagonal = tl.where(at[:, None] == at[None, :], met, 0.0)
                tl.store(of_D + of_head + first + at, tl.sum(diagonal, 1))
                total = tl.load(totals + of_head + first + at)
                met *= within(total, position, CHUNK, PACKED, False)
            else:
                gap = _between(totals + of_head, start, earlier, chunk, CHUNK, CHUNKS) * open_
                met *= (_reach(totals + of_head, first, entered, False, CHUNK) * gap)[:, None]
                met *= _reach(totals + of_head, there, leaves, True, CHUNK)[None, :]
            tl.store(directs + of_head + there + at, tl.sum(met * scores, 0))
            met *= tl.load(steps + of_head + there + at)[None, :]
            summed += met
            met *= scores
            if SAME:
                before = tl.where(at[:, None] < at[None, :], 1.0, 0.0).to(kind)
                met = tl.dot(
                    met.to(kind), before, input_precision=PRECISION, out_dtype=tl.float32
                )  # fmt: skip
                met = tl.where(at[:, None] >= at[None, :], met, 0.0)
                tl.store(outs + of_head + first + at, tl.sum(met, 0))
            else:
                tl.store(outs + of_head + first + at, tl.sum(met, 1))
        place = ((row * tl.cdiv(length, CHUNK) + chunk) * CHUNKS + distance) * blocks + block
        to = weights + place * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]
        tl.store(to, summed.to(kind))


@triton.jit
def _open(positions, low, high, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return 1 if no document begins in the chunks from `low` to before `high`, else 0."""
    open_ = 1.0
    if PACKED:
        for chunk in range(low, high):
            _, _, unbroken = marks(positions, chunk * CHUNK, length, CHUNK, True)
            open_ *= unbroken
    return open_


@triton.jit
def shared(
    mine, own, other, steps, totals, positions, states, weights, scalars, partial,
    length, padded, spans, heads, share, dim, size, mine_row, mine_token, b_row, b_token,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DIM: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of C (`own`; `mine` is the gradient of y, and `states` those at the start
    of the spans); if BACKWARD, of B (x, and the gradients of the states at their ends).

    `scalars` receives the sums of the products of a token with all those before the span (BACKWARD:
    after it, divided by the step).
    """
    chunk, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kind: tl.constexpr = mine.dtype.element_ty
    head = block * HEADS
    blocks = heads // HEADS
    first = chunk * CHUNK
    mine += row * mine_row + head * dim
    own += row * b_row + head // share * size
    other += row * b_row + head // share * size
    steps += (row * heads + head) * padded + first
    totals += (row * heads + head) * padded
    scalars += (row * heads + head) * padded + first
    positions += row * length
    chunks = tl.cdiv(length, CHUNK)
    start = chunk // CHUNKS * CHUNKS
    end = tl.minimum(start + CHUNKS, chunks)
    side = tl.arange(0, CHUNK)
    at = side[:, None] * CHUNK + side[None, :]
    summed = tl.zeros([CHUNK, SIZE], dtype=tl.float32)
    for distance in range(end - chunk if BACKWARD else chunk - start + 1):
        later = chunk + distance if BACKWARD else chunk
        place = ((row * chunks + later) * CHUNKS + distance) * blocks + block
        weight = tl.load(weights + place * CHUNK * CHUNK + at)
        across = (later if BACKWARD else chunk - distance) * CHUNK
        facing = tile(other, b_token, across, length, size, CHUNK, SIZE)
        summed = plus(summed, tl.trans(weight) if BACKWARD else weight, facing, PRECISION)
    low, high = start - 1, chunk
    if BACKWARD:
        low, high = chunk, end
    entered, leaves, _ = marks(positions, first, length, CHUNK, PACKED)
    mark = leaves if BACKWARD else entered
    open_ = _open(positions, low + 1, high, length, CHUNK, PACKED)
    ours = tile(own, b_token, first, length, size, CHUNK, SIZE)
    states += ((row * spans + chunk // CHUNKS) * heads + head) * dim * size
    for number in range(HEADS):
        of_head = number * padded
        gap = _between(totals + of_head, start, low, high, CHUNK, CHUNKS) * open_
        reach = _reach(totals + of_head, first, mark, BACKWARD, CHUNK) * gap
        here = tile(mine + number * dim, mine_token, first, length, dim, CHUNK, DIM)
        place, real = state_at(states + number * dim * size, dim, size, DIM, SIZE)
        pushed = (here.to(tl.float32) * reach[:, None]).to(kind)
        through = tl.dot(
            pushed, tl.load(place, mask=real, other=0.0), input_precision=PRECISION,
            out_dtype=tl.float32,
        )  # fmt: skip
        tl.store(scalars + of_head + side, tl.sum(through * ours.to(tl.float32), 1))
        if BACKWARD:
            through *= tl.load(steps + of_head + side)[:, None]
        summed += through
    token = first + side[:, None]
    mode = tl.arange(0, SIZE)[None, :]
    to = ((block * tl.num_programs(2) + row) * length + token) * size + mode
    tl.store(partial + to, summed, mask=(token < length) & (mode < size))


@triton.jit
def collect(
    partial, out, length, groups, blocks, size, out_row, out_token,
    CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of B and C over the blocks of a group's heads."""
    chunk, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    mode = tl.arange(0, SIZE)[None, :]
    here = (token < length) & (mode < size)
    summed = tl.zeros([CHUNK, SIZE], dtype=tl.float32)
    for number in range(blocks):
        place = (group * blocks + number) * tl.num_programs(2) + row
        summed += tl.load(partial + (place * length + token) * size + mode, mask=here, other=0.0)
    to = out + row * out_row + token.to(tl.int64) * out_token + group * size + mode
    tl.store(to, summed.to(out.dtype.element_ty), mask=here)


@triton.jit
def steps_backward(
    dt, bias, A_log, steps, outs, directs, entries, exits, of_D, met, grad_dt, sums,
    length, heads, padded, spans, parts, dt_row, dt_token,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of dt and, summed over a span, those of the bias, A_log and D.

    A step enters the decays between the tokens before it and those from it on. Of the products of
    these pairs, `met` has those of pairs around the whole span.
    """
    span, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    real = head < heads
    offset = tl.load(bias + head, mask=real, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head, mask=real, other=0.0).to(tl.float32))
    start = span * CHUNKS
    end = tl.minimum(start + CHUNKS, tl.cdiv(length, CHUNK))
    across = tl.zeros([1, HEADS], dtype=tl.float32)  # pairs around the end of the chunk
    for part in range(parts):
        place = ((row * spans + span) * heads + head) * parts + part
        across += tl.load(met + place, mask=real, other=0.0)
    for chunk in range(start, end):
        token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        place = (row * heads + head) * padded + token
        leaving = tl.load(exits + place, mask=real, other=0.0)
        leaving *= tl.load(steps + place, mask=real, other=0.0)
        across += tl.sum(leaving, axis=0)[None, :]
    of_bias = tl.zeros([1, HEADS], dtype=tl.float32)
    of_rate = tl.zeros([1, HEADS], dtype=tl.float32)
    of_skip = tl.zeros([1, HEADS], dtype=tl.float32)
    for number in range(start, end):
        chunk = start + end - 1 - number
        token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        here = (token < length) & real
        place = (row * heads + head) * padded + token
        step = tl.load(steps + place, mask=real, other=0.0)
        slot = (row * CHUNKS * heads + head) * padded + token
        entering = tl.load(entries + place, mask=real, other=0.0)
        leaving = tl.load(exits + place, mask=real, other=0.0)
        for distance in tl.static_range(1, CHUNKS):
            far = distance * heads * padded
            from_ = real & (token - distance * CHUNK >= start * CHUNK)
            onto = real & (token + distance * CHUNK < end * CHUNK)
            entering += tl.load(outs + slot + far, mask=from_, other=0.0)
            leaving += tl.load(directs + slot + far, mask=onto, other=0.0)
        direct = tl.load(directs + slot, mask=real, other=0.0) + leaving
        leaving *= step
        entered = tl.sum(entering, axis=0)[None, :]
        across -= tl.sum(leaving, axis=0)[None, :]
        around = tl.load(outs + slot, mask=real, other=0.0) + across
        around += tl.cumsum(leaving, axis=0) - leaving  # pairs that begin before the token
        around += entered - tl.cumsum(entering, axis=0) + entering  # that end at it or later
        across += entered
        at = token.to(tl.int64) * dt_token + head
        _, slope = softplus(dt + row * dt_row, at, here, offset)
        of_raw = tl.where(here, (direct + around * rate) * slope, 0.0)
        to = grad_dt + (row * length + token) * heads + head
        tl.store(to, of_raw.to(grad_dt.dtype.element_ty), mask=here)
        of_bias += tl.sum(of_raw, axis=0)[None, :]
        of_rate += tl.sum(around * step, axis=0)[None, :]
        of_skip += tl.sum(tl.load(of_D + place, mask=real, other=0.0), axis=0)[None, :]
    to = sums + (row * spans + span) * 3 * heads + head
    tl.store(to, of_bias, mask=real)
    tl.store(to + heads, of_rate * rate, mask=real)
    tl.store(to + 2 * heads, of_skip, mask=real)
