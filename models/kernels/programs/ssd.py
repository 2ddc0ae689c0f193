"""Triton programs of ssd.py: each processes a chunk of one head.

total_t is the logarithm of the decay from the chunk's start to t; `fade` is the decay from a token
to the chunk's end. Across a document's start the decay is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decays(dt, A, positions, first, length, heads, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return dt, total, its value at the end, fade, the decay from the chunk's start, and 1 if no
    document begins in the chunk."""
    at = tl.arange(0, CHUNK)
    here = first + at < length
    steps = tl.load(dt + at * heads, mask=here, other=0.0)
    total = tl.cumsum(steps * A, axis=0)
    end = tl.sum(steps * A, axis=0)
    fade = tl.exp(end - total)
    carried = tl.exp(total)
    unbroken = 1.0
    if PACKED:
        position = tl.load(positions + at, mask=here, other=1).to(tl.int32)
        latest = tl.max(tl.where(position == 0, at, -1), axis=0)
        fade = tl.where(at >= latest, fade, 0.0)
        carried = tl.where(position > at, carried, 0.0)
        unbroken = (latest < 0).to(tl.float32)
    return steps, total, end, fade, carried, unbroken


@triton.jit
def _within(total, positions, first, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return [t, s]: the decay from s to t."""
    at = tl.arange(0, CHUNK)
    seen = at[None, :] <= at[:, None]
    if PACKED:
        here = first + at < length
        position = tl.load(positions + at, mask=here, other=0).to(tl.int32)
        seen = seen & (at[:, None] - at[None, :] <= position[:, None])
    apart = tl.where(seen, total[:, None] - total[None, :], 0.0)
    return tl.where(seen, tl.exp(apart), 0.0)


@triton.jit
def _tile(x, stride, first, length, size, CHUNK: tl.constexpr, SIDE: tl.constexpr):
    """Load [CHUNK, SIDE] of a chunk's tokens."""
    at = tl.arange(0, CHUNK)[:, None]
    side = tl.arange(0, SIDE)[None, :]
    here = (first + at < length) & (side < size)
    return tl.load(x + at * stride + side, mask=here, other=0.0)


@triton.jit
def _state(states, dim, size, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Return the offsets of a state's numbers, and their mask."""
    row = tl.arange(0, DIM)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    return states + row * size + column, (row < dim) & (column < size)


@triton.jit
def _part(states, dim, size, first, DIM: tl.constexpr, PART: tl.constexpr):
    """Load PART of a state's columns."""
    row = tl.arange(0, DIM)[:, None]
    column = first + tl.arange(0, PART)[None, :]
    real = (row < dim) & (column < size)
    return tl.load(states + row * size + column, mask=real, other=0.0)


@triton.jit
def _plus(total, a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def summaries(
    x, dt, A, B, positions, added, keep, length, chunks, heads, share, dim, size,
    x_row, x_token, b_row, b_token,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a chunk's contribution to the state after it; if BACKWARD, with the gradient of y for x
    and C for B, to the gradient of the state before it."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    kind = x.dtype.element_ty
    start = first.to(tl.int64)
    steps, _, end, fade, carried, unbroken = _decays(
        dt + (row * length + start) * heads + head, tl.load(A + head),
        positions + row * length + start, first, length, heads, CHUNK, PACKED,
    )  # fmt: skip
    inputs = _tile(
        x + row * x_row + start * x_token + head * dim, x_token, first, length, dim, CHUNK, DIM
    ).to(tl.float32)
    into = _tile(
        B + row * b_row + start * b_token + head // share * size, b_token, first, length, size,
        CHUNK, SIZE,
    )  # fmt: skip
    weight = carried if BACKWARD else steps * fade
    state = tl.dot(
        tl.trans((inputs * weight[:, None]).to(kind)), into.to(kind),
        input_precision=PRECISION, out_dtype=tl.float32,
    )  # fmt: skip
    place = (row * chunks + chunk) * heads + head
    to, real = _state(added + place * dim * size, dim, size, DIM, SIZE)
    tl.store(to, state, mask=real)
    if not BACKWARD:
        tl.store(keep + place, tl.exp(end) * unbroken)


@triton.jit
def carry(
    added, states, start, keep, end, chunks, heads, numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Scan the chunks' contributions `added`: write the states after the last chunk to `end` and,
    if WRITE, those at each chunk's start to `states`."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < numbers
    current = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        current += tl.load(start + (row * heads + head) * numbers + at, mask=real, other=0.0)
    for block in range(tl.cdiv(chunks, AHEAD)):
        adds = ()
        keeps = ()
        for step in tl.static_range(AHEAD):  # all loads before the first use
            number = tl.minimum(block * AHEAD + step, chunks - 1)
            chunk = chunks - 1 - number if BACKWARD else number
            place = (row * chunks + chunk) * heads + head
            adds = adds + (tl.load(added + place * numbers + at, mask=real, other=0.0),)
            keeps = keeps + (tl.load(keep + place),)
        for step in tl.static_range(AHEAD):
            number = block * AHEAD + step
            if number < chunks:
                if WRITE:
                    chunk = chunks - 1 - number if BACKWARD else number
                    place = (row * chunks + chunk) * heads + head
                    tl.store(
                        states + place * numbers + at,
                        current.to(states.dtype.element_ty),
                        mask=real,
                    )
                current = current * keeps[step] + adds[step]
    tl.store(end + (row * heads + head) * numbers + at, current, mask=real)


@triton.jit
def forward(
    x, dt, A, B, C, positions, states, out, length, chunks, heads, share, dim, size,
    x_row, x_token, b_row, b_token, c_row, c_token,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    kind = x.dtype.element_ty
    start = first.to(tl.int64)
    positions += row * length + start
    steps, total, _, _, carried, _ = _decays(
        dt + (row * length + start) * heads + head, tl.load(A + head), positions, first, length,
        heads, CHUNK, PACKED,
    )  # fmt: skip
    x += row * x_row + start * x_token + head * dim
    B += row * b_row + start * b_token + head // share * size
    C += row * c_row + start * c_token + head // share * size
    inputs = _tile(x, x_token, first, length, dim, CHUNK, DIM)
    into = _tile(B, b_token, first, length, size, CHUNK, SIZE)
    outof = _tile(C, c_token, first, length, size, CHUNK, SIZE)
    scores = tl.dot(outof, tl.trans(into), input_precision=PRECISION, out_dtype=tl.float32)
    mixing = scores * _within(total, positions, first, length, CHUNK, PACKED) * steps[None, :]
    y = tl.dot(mixing.to(kind), inputs, input_precision=PRECISION, out_dtype=tl.float32)
    place = (row * chunks + chunk) * heads + head
    at, real = _state(states + place * dim * size, dim, size, DIM, SIZE)
    state = tl.load(at, mask=real, other=0.0)
    through = tl.dot(outof, tl.trans(state), input_precision=PRECISION, out_dtype=tl.float32)
    y += through * carried[:, None]
    token = tl.arange(0, CHUNK)[:, None]
    channel = tl.arange(0, DIM)[None, :]
    here = (first + token < length) & (channel < dim)
    to = out + ((row * length + start + token) * heads + head) * dim + channel
    tl.store(to, y.to(out.dtype.element_ty), mask=here)


@triton.jit
def backward(
    grad, x, dt, A, B, C, positions, states, adjoints, keep, grad_x, grad_dt, grad_A, grad_B,
    grad_C, length, chunks, heads, share, dim, size,
    x_row, x_token, b_row, b_token, c_row, c_token,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients; those of B and C by head. `adjoints`: gradients of the states after the
    chunks."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    kind = x.dtype.element_ty
    start = first.to(tl.int64)
    positions += row * length + start
    rate = tl.load(A + head)
    steps, total, _, fade, carried, _ = _decays(
        dt + (row * length + start) * heads + head, rate, positions, first, length, heads, CHUNK,
        PACKED,
    )  # fmt: skip
    x += row * x_row + start * x_token + head * dim
    B += row * b_row + start * b_token + head // share * size
    C += row * c_row + start * c_token + head // share * size
    grad += ((row * length + start) * heads + head) * dim
    inputs = _tile(x, x_token, first, length, dim, CHUNK, DIM)
    above = _tile(grad, heads * dim, first, length, dim, CHUNK, DIM)
    place = (row * chunks + chunk) * heads + head
    states += place * dim * size
    adjoints += place * dim * size

    # PART of the states' numbers at a time: all of them leave no registers for the rest.
    scores = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    through = tl.zeros([CHUNK, DIM], dtype=tl.float32)
    ends = tl.zeros([CHUNK, DIM], dtype=tl.float32)
    kept = tl.zeros([DIM], dtype=tl.float32)
    for number in range(tl.cdiv(size, PART)):
        part = number * PART
        into = _tile(B + part, b_token, first, length, size - part, CHUNK, PART)
        outof = _tile(C + part, c_token, first, length, size - part, CHUNK, PART)
        state = _part(states, dim, size, part, DIM, PART)
        adjoint = _part(adjoints, dim, size, part, DIM, PART)
        scores = _plus(scores, outof, tl.trans(into), PRECISION)
        through = _plus(through, outof, tl.trans(state), PRECISION)
        ends = _plus(ends, into, tl.trans(adjoint), PRECISION)
        kept += tl.sum(state.to(tl.float32) * adjoint.to(tl.float32), axis=1)

    met = tl.dot(above, tl.trans(inputs), input_precision=PRECISION, out_dtype=tl.float32)
    within = _within(total, positions, first, length, CHUNK, PACKED)
    mixing = scores * within * steps[None, :]
    of_x = _plus(ends * (steps * fade)[:, None], tl.trans(mixing.to(kind)), above, PRECISION)
    token = tl.arange(0, CHUNK)
    here = first + token < length
    flat = (row * length + start + token) * heads + head
    channel = tl.arange(0, DIM)
    to = grad_x + flat[:, None] * dim + channel[None, :]
    tl.store(to, of_x.to(kind), mask=here[:, None] & (channel < dim)[None, :])

    of_decay = met * scores * within
    added = tl.sum(inputs.to(tl.float32) * ends, axis=1) * fade  # the gradient of dt at the token
    of_carried = tl.sum(above.to(tl.float32) * through, axis=1) * carried
    behind = tl.sum(of_decay, axis=0)  # by input token
    of_total = tl.sum(of_decay * steps[None, :], axis=1) - behind * steps + of_carried
    of_total -= added * steps
    of_end = tl.sum(added * steps, axis=0) + tl.sum(kept, axis=0) * tl.load(keep + place)
    # A step enters every total from its token on, and the decay to the end.
    later = tl.sum(of_total, axis=0) - tl.cumsum(of_total, axis=0) + of_total + of_end
    tl.store(grad_dt + flat, behind + added + later * rate, mask=here)
    tl.store(grad_A + place, tl.sum(later * steps, axis=0))

    of_scores = (met * within * steps[None, :]).to(kind)
    pulled = (above.to(tl.float32) * carried[:, None]).to(kind)
    pushed = (inputs.to(tl.float32) * (steps * fade)[:, None]).to(kind)
    mode = tl.arange(0, PART)
    for number in range(tl.cdiv(size, PART)):
        part = number * PART
        into = _tile(B + part, b_token, first, length, size - part, CHUNK, PART)
        outof = _tile(C + part, c_token, first, length, size - part, CHUNK, PART)
        of_C = tl.dot(of_scores, into, input_precision=PRECISION, out_dtype=tl.float32)
        of_C = _plus(of_C, pulled, _part(states, dim, size, part, DIM, PART), PRECISION)
        of_B = tl.dot(
            tl.trans(of_scores), outof, input_precision=PRECISION, out_dtype=tl.float32
        )  # fmt: skip
        of_B = _plus(of_B, pushed, _part(adjoints, dim, size, part, DIM, PART), PRECISION)
        there = flat[:, None] * size + part + mode[None, :]
        inside = here[:, None] & (part + mode < size)[None, :]
        tl.store(grad_B + there, of_B.to(grad_B.dtype.element_ty), mask=inside)
        tl.store(grad_C + there, of_C.to(grad_C.dtype.element_ty), mask=inside)
