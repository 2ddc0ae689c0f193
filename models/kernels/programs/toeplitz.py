"""The Triton programs of toeplitz.py.

A program has the filter of one group as matrices of CHUNK × CHUNK, one for each pass, and a span
of tokens. It takes CHUNKS chunks at a time, side by side with their channels as the columns of one
product. Where a document begins among them, they are taken one by one, with what lies before that
document struck out of the matrices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gated_input import gated_input


@triton.jit
def _matrices(
    taps, kind: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """H_p[t, s] = h[t − s + p·CHUNK]."""
    side = tl.arange(0, CHUNK)
    matrices = ()
    for back in tl.static_range(PASSES):
        lag = side[:, None] - side[None, :] + back * CHUNK
        h = tl.load(taps + lag, mask=(lag >= 0) & (lag < REACH), other=0.0)
        matrices = matrices + (h.to(kind),)
    return matrices


@triton.jit
def _seen(matrix, positions, start, length, BACK: tl.constexpr, CHUNK: tl.constexpr):
    """What of a matrix stays within the document of each token of the chunk at `start`."""
    side = tl.arange(0, CHUNK)
    there = (start + side >= 0) & (start + side < length)
    position = tl.load(positions + start + side, mask=there, other=0).to(tl.int32)
    lag = side[:, None] - side[None, :] + BACK * CHUNK
    return tl.where(lag <= position[:, None], matrix, 0.0)


@triton.jit
def _begins(
    positions, start, length,
    REACH: tl.constexpr, HISTORY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """How many tokens of a span have a document's beginning within their reach."""
    token = start + tl.arange(0, TOKENS)
    there = (token >= 0) & (token < length)
    position = tl.load(positions + token, mask=there, other=REACH).to(tl.int32)
    behind = REACH - 1
    if not HISTORY:
        behind = tl.minimum(token, REACH - 1)  # nothing stands before the row
    return tl.sum((position < behind).to(tl.int32), axis=0)


@triton.jit
def _columns(first, last, width, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SIDE: tl.constexpr):
    """The token and the channel of each column, two-sided; `width` where there is no channel."""
    column = tl.arange(0, CHUNKS * SIDE)
    channel = first + column % SIDE
    channel = tl.where(channel < last, channel, width)
    token = tl.arange(0, CHUNK)[:, None] + (column // SIDE * CHUNK)[None, :]
    return token, channel[None, :]


@triton.jit
def _filtered(
    x, history, matrices, skip, positions, start, first, last, length, width, token_stride,
    REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SIDE: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, HISTORY: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_p H_p·W_{n−p} + skip·W_n of CHUNKS chunks from `start`, where x is."""
    kind = x.dtype.element_ty
    token, channel = _columns(first, last, width, CHUNKS, CHUNK, SIDE)
    y = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)
    for back in tl.static_range(PASSES):
        w = gated_input(
            x, history, start, token - back * CHUNK, channel, length, width, token_stride,
            REACH - 1, GATED, HISTORY,
        )  # fmt: skip
        h = matrices[back]
        if MASKED:
            h = _seen(h, positions, start, length, back, CHUNK)
        y = tl.dot(h, w.to(kind), y, input_precision=PRECISION, out_dtype=tl.float32)
        if back == 0 and SKIP:
            y += w * tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
    return y


@triton.jit
def _forward_tile(
    x, history, matrices, skip, positions, out, start, first, last, length, width, token_stride,
    REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SIDE: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, HISTORY: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    x += start.to(tl.int64) * token_stride
    y = _filtered(
        x, history, matrices, skip, positions, start, first, last, length, width, token_stride,
        REACH, PASSES, CHUNK, CHUNKS, SIDE, GATED, SKIP, HISTORY, MASKED, PRECISION,
    )  # fmt: skip
    token, channel = _columns(first, last, width, CHUNKS, CHUNK, SIDE)
    here = (start + token < length) & (channel < width)
    if GATED:
        y *= tl.load(x + token * token_stride + channel, mask=here, other=0.0).to(tl.float32)
    out += start.to(tl.int64) * width
    tl.store(out + token * width + channel, y.to(out.dtype.element_ty), mask=here)


@triton.jit
def forward(
    x, history, taps, skip, positions, out, length, width, share, blocks, row_stride, token_stride,
    each,
    REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SIDE: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, HISTORY: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    columns = width // share * blocks
    group = tl.program_id(0) % columns // blocks
    first = group * share + tl.program_id(0) % blocks * SIDE
    last = (group + 1) * share
    x += row * row_stride
    out += row * length * width
    positions += row * length
    history += row * (REACH - 1) * width
    matrices = _matrices(taps + group * REACH, x.dtype.element_ty, REACH, PASSES, CHUNK)
    for number in range(each):
        start = (tl.program_id(0) // columns * each + number) * (CHUNK * CHUNKS)
        masked = 0
        if PACKED:
            masked = _begins(positions, start, length, REACH, HISTORY, CHUNK * CHUNKS)
        if masked > 0:
            for chunk in range(CHUNKS):
                _forward_tile(
                    x, history, matrices, skip, positions, out, start + chunk * CHUNK, first,
                    last, length, width, token_stride,
                    REACH, PASSES, CHUNK, 1, SIDE, GATED, SKIP, HISTORY, True, PRECISION,
                )  # fmt: skip
        else:
            _forward_tile(
                x, history, matrices, skip, positions, out, start, first, last, length, width,
                token_stride,
                REACH, PASSES, CHUNK, CHUNKS, SIDE, GATED, SKIP, HISTORY, False, PRECISION,
            )  # fmt: skip


@triton.jit
def _backward_tile(
    grad, x, history, matrices, skip, positions, grad_x, grad_history, sums, skipped, start, first,
    last, length, width, token_stride,
    REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SIDE: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, HISTORY: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of x; returns `sums` and `skipped` with what these chunks add."""
    kind = x.dtype.element_ty
    x += start.to(tl.int64) * token_stride
    grad += start.to(tl.int64) * width
    token, channel = _columns(first, last, width, CHUNKS, CHUNK, SIDE)
    real = channel < width
    here = real & (start + token >= 0) & (start + token < length)
    at = token * token_stride + channel
    place = token * width + channel

    pulled = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)  # the gradient of w
    for ahead in tl.static_range(PASSES):
        later = start + token + ahead * CHUNK
        there = real & (later >= 0) & (later < length)
        g = tl.load(grad + place + ahead * CHUNK * width, mask=there, other=0.0)
        if GATED:
            q = tl.load(x + at + ahead * CHUNK * token_stride, mask=there, other=0.0)
            g = (g.to(tl.float32) * q.to(tl.float32)).to(kind)
        if ahead == 0:
            now = g
            if SKIP:
                scale = tl.load(skip + channel, mask=real, other=0.0).to(tl.float32)
                pulled += now.to(tl.float32) * scale
        h = matrices[ahead]
        if MASKED:
            h = _seen(h, positions, start + ahead * CHUNK, length, ahead, CHUNK)
        pulled = tl.dot(tl.trans(h), g, pulled, input_precision=PRECISION, out_dtype=tl.float32)

    y = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)  # the filtered row, once more
    new = ()
    for back in tl.static_range(PASSES):
        w = gated_input(
            x, history, start, token - back * CHUNK, channel, length, width, token_stride,
            REACH - 1, GATED, HISTORY,
        )  # fmt: skip
        if back == 0 and SKIP:
            if GATED:
                y += w * tl.load(skip + channel, mask=real, other=0.0).to(tl.float32)
            both = tl.sum(now.to(tl.float32) * w, axis=0)
            skipped += tl.sum(tl.reshape(both, [CHUNKS, SIDE]), axis=0)
        w = w.to(kind)
        met = tl.dot(now, tl.trans(w), input_precision=PRECISION, out_dtype=tl.float32)
        h = matrices[back]
        if MASKED:
            met = _seen(met, positions, start, length, back, CHUNK)
            h = _seen(h, positions, start, length, back, CHUNK)
        new = new + (sums[back] + met,)
        if GATED:
            y = tl.dot(h, w, y, input_precision=PRECISION, out_dtype=tl.float32)

    grad_x += start.to(tl.int64) * width * (3 if GATED else 1)
    if GATED:
        y *= tl.load(grad + place, mask=here, other=0.0).to(tl.float32)
        k = tl.load(x + at + width, mask=here, other=0.0).to(tl.float32)
        v = tl.load(x + at + 2 * width, mask=here, other=0.0).to(tl.float32)
        to = grad_x + token * (3 * width) + channel
        tl.store(to, y.to(kind), mask=here)
        tl.store(to + width, (pulled * v).to(kind), mask=here)
        tl.store(to + 2 * width, (pulled * k).to(kind), mask=here)
    else:
        tl.store(grad_x + place, pulled.to(kind), mask=here)
    if HISTORY:
        kept = start + token + REACH - 1
        before = real & (start + token < 0) & (kept >= 0)
        tl.store(grad_history + kept * width + channel, pulled.to(kind), mask=before)
    return new, skipped


@triton.jit
def backward(
    grad, x, history, taps, skip, positions, grad_x, grad_history, met, grad_skip,
    length, width, share, blocks, row_stride, token_stride, each,
    REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SIDE: tl.constexpr, GATED: tl.constexpr, SKIP: tl.constexpr, HISTORY: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the filter, `met` gets Σ G_n·W_{n−p}ᵀ: its diagonals are the gradients of the taps."""
    row = tl.program_id(1).to(tl.int64)
    columns = width // share * blocks
    group = tl.program_id(0) % columns // blocks
    part = tl.program_id(0) // columns
    first = group * share + tl.program_id(0) % blocks * SIDE
    last = (group + 1) * share
    grad += row * length * width
    x += row * row_stride
    grad_x += row * length * width * (3 if GATED else 1)
    positions += row * length
    history += row * (REACH - 1) * width
    grad_history += row * (REACH - 1) * width
    matrices = _matrices(taps + group * REACH, x.dtype.element_ty, REACH, PASSES, CHUNK)
    sums = ()
    for _ in tl.static_range(PASSES):
        sums = sums + (tl.zeros([CHUNK, CHUNK], dtype=tl.float32),)
    skipped = tl.zeros([SIDE], dtype=tl.float32)
    for number in range(each):
        start = (part * each + number) * (CHUNK * CHUNKS)
        if HISTORY:
            start -= (PASSES - 1) * CHUNK  # what stands before the row has gradients as well
        masked = 0
        if PACKED:  # those who see these chunks, and those whom these see
            masked = _begins(positions, start, length, REACH, HISTORY, CHUNK * CHUNKS)
            for ahead in tl.static_range(1, PASSES):
                after = start + (CHUNKS - 1 + ahead) * CHUNK
                masked += _begins(positions, after, length, REACH, HISTORY, CHUNK)
        if masked > 0:
            for chunk in range(CHUNKS):
                sums, skipped = _backward_tile(
                    grad, x, history, matrices, skip, positions, grad_x, grad_history, sums,
                    skipped, start + chunk * CHUNK, first, last, length, width, token_stride,
                    REACH, PASSES, CHUNK, 1, SIDE, GATED, SKIP, HISTORY, True, PRECISION,
                )  # fmt: skip
        else:
            sums, skipped = _backward_tile(
                grad, x, history, matrices, skip, positions, grad_x, grad_history, sums, skipped,
                start, first, last, length, width, token_stride,
                REACH, PASSES, CHUNK, CHUNKS, SIDE, GATED, SKIP, HISTORY, False, PRECISION,
            )  # fmt: skip
    side = tl.arange(0, CHUNK)
    met += (row * tl.num_programs(0) + tl.program_id(0)) * (PASSES * CHUNK * CHUNK)
    for back in tl.static_range(PASSES):
        to = met + (back * CHUNK + side[:, None]) * CHUNK + side[None, :]
        tl.store(to, sums[back])
    if SKIP:
        parts = tl.num_programs(0) // columns
        channel = first + tl.arange(0, SIDE)
        to = grad_skip + (row * parts + part) * width + channel
        tl.store(to, skipped, mask=channel < last)
