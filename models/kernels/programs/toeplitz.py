"""Triton programs of toeplitz.py.

A program holds the filter of one group as matrices of CHUNK × CHUNK,
H_p[t, s] = h[t − s + p·CHUNK], and walks along CHUNKS streams of the row in parallel: the columns
of its products are one chunk of each stream, with their channels.

Documents are kept apart by masking tokens of the products' inputs, never the matrices. Between
chunks only the document that spans them passes: tokens from its first to its last. Within a chunk
H₀ is multiplied once for each document, as often as the chunk with the most documents needs;
`begin` and `end` are numbers for each stream. The loop over documents is a `while`: of a `for` that
masks the sum of a product, Triton's compiler (3.6 and 3.9) makes no program for sm_100.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_matrices(
    taps, REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    side = tl.arange(0, CHUNK)
    matrices = ()
    for back in tl.static_range(PASSES):
        lag = side[:, None] - side[None, :] + back * CHUNK
        h = tl.load(taps + lag, mask=(lag >= 0) & (lag < REACH), other=0.0)
        matrices = matrices + (h,)
    return matrices


@triton.jit
def repeat_for_channels(of_streams, CHUNKS: tl.constexpr, SIDE: tl.constexpr):
    """Repeat a number of each stream for each of its channels, as a matrix."""
    each = tl.broadcast_to(of_streams[:, None], [CHUNKS, SIDE])
    return tl.reshape(each, [CHUNKS * SIDE])[None, :]


@triton.jit
def load_document_starts(positions, start, length, CHUNK: tl.constexpr):
    """Return [CHUNK, CHUNKS]: true where a document begins, in the chunks at `start`.

    The first document of a row may begin before the row.
    """
    token = start[None, :] + tl.arange(0, CHUNK)[:, None]
    position = tl.load(positions + tl.maximum(token, 0), mask=token < length, other=1)
    return position + tl.minimum(token, 0) == 0


@triton.jit
def tokens_before(positions, start, length):
    """Count the tokens before each chunk that belong to the document that continues in it."""
    position = tl.load(positions + tl.maximum(start, 0), mask=start < length, other=0)
    return position + tl.minimum(start, 0)


@triton.jit
def next_document_start(begins, token, CHUNK: tl.constexpr):
    """Return [CHUNKS]: the start of the next document after a token of each chunk, or CHUNK."""
    time = tl.arange(0, CHUNK)[:, None]
    return tl.min(tl.where(begins & (time > token), time, CHUNK), axis=0)


@triton.jit
def last_document_start(begins, CHUNK: tl.constexpr):
    """Return [CHUNKS]: the start of the last document in each chunk, or 0."""
    time = tl.arange(0, CHUNK)[:, None]
    return tl.max(tl.where(begins, time, 0), axis=0)


@triton.jit
def dot_add(a, b, to, PRECISION: tl.constexpr):
    return tl.dot(a, b, to, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def max_starts(begins):
    """Return the largest number of documents that begin in one chunk."""
    return tl.max(tl.sum(begins.to(tl.int32), axis=0), axis=0)


@triton.jit
def token_mask(start, channel, last, length, CHUNK: tl.constexpr):
    token = start + tl.arange(0, CHUNK)[:, None]
    return (channel < last) & (token >= 0) & (token < length)


@triton.jit
def load_inputs(
    x, history, at, start, channel, last, length, width,
    REACH: tl.constexpr, CHUNK: tl.constexpr, GATED: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Load w = k ⊙ v of the chunks at `start`, at offsets `at` of x; zeros outside the row."""
    here = token_mask(start, channel, last, length, CHUNK)
    if GATED:
        k = tl.load(x + width + at, mask=here, other=0.0).to(tl.float32)
        w = k * tl.load(x + 2 * width + at, mask=here, other=0.0).to(tl.float32)
    else:
        w = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    if HISTORY:
        place = start + tl.arange(0, CHUNK)[:, None] + (REACH - 1)
        before = (channel < last) & (place >= 0) & (place < REACH - 1)
        w += tl.load(history + place * width + channel, mask=before, other=0.0).to(tl.float32)
    return w


@triton.jit
def toeplitz_forward(
    x, history, taps, skip, positions, out, length, width, row_stride, token_stride, parts, each,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kind = x.dtype.element_ty
    columns = width // SHARE * BLOCKS
    group = tl.program_id(0) % columns // BLOCKS
    part = tl.program_id(0) // columns % parts
    row = (tl.program_id(0) // columns // parts).to(tl.int64)
    last = (group + 1) * SHARE
    column = tl.arange(0, CHUNKS * SIDE)[None, :]
    channel = group * SHARE + tl.program_id(0) % BLOCKS * SIDE + column % SIDE
    time = tl.arange(0, CHUNK)[:, None]
    starts = (part * CHUNKS + tl.arange(0, CHUNKS)) * (each * CHUNK)
    start = (part * CHUNKS + column // SIDE) * (each * CHUNK)  # by column
    at = start.to(tl.int64) * token_stride + channel + time * token_stride
    to = start.to(tl.int64) * width + channel + time * width
    x += row * row_stride
    out += row * length * width
    positions += row * length
    history += row * (REACH - 1) * width
    matrices = load_matrices(taps + group * REACH, REACH, PASSES, CHUNK)
    if SKIP:
        scale = tl.load(skip + channel, mask=channel < last, other=0.0).to(tl.float32)
    before = ()  # W of earlier chunks, as far as this chunk sees it
    for back in tl.static_range(1, PASSES):
        w = load_inputs(
            x - (back * CHUNK) * token_stride, history, at, start - back * CHUNK, channel, last,
            length, width, REACH, CHUNK, GATED, HISTORY,
        )  # fmt: skip
        if PACKED:
            open = tokens_before(positions, start, length)
            w = tl.where(time - back * CHUNK >= -open, w, 0.0)
        before = before + (w.to(kind),)
    for _ in range(each):
        now = load_inputs(
            x, history, at, start, channel, last, length, width, REACH, CHUNK, GATED, HISTORY
        ).to(kind)
        y = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)
        for back in tl.static_range(1, PASSES):
            y = dot_add(matrices[back], before[back - 1], y, PRECISION)
        left = now
        if PACKED:
            begins = load_document_starts(positions, starts, length, CHUNK)
            begin, end = tl.zeros([CHUNKS], tl.int32), next_document_start(begins, -1, CHUNK)
            unbroken = repeat_for_channels(end, CHUNKS, SIDE) == CHUNK
            documents = max_starts(begins) + 1
            while documents > 0:
                to_end = time < repeat_for_channels(end, CHUNKS, SIDE)
                own = tl.where(
                    to_end & (time >= repeat_for_channels(begin, CHUNKS, SIDE)), now, 0.0
                )
                y = tl.where(to_end, dot_add(matrices[0], own, y, PRECISION), 0.0)
                begin, end = end, next_document_start(begins, end[None, :], CHUNK)
                documents -= 1
            left = tl.where(
                time >= repeat_for_channels(last_document_start(begins, CHUNK), CHUNKS, SIDE),
                now,
                0.0,
            )
        else:
            y = dot_add(matrices[0], now, y, PRECISION)
        if SKIP:
            y += now.to(tl.float32) * scale
        here = token_mask(start, channel, last, length, CHUNK)
        if GATED:
            y *= tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        tl.store(out + to, y.to(kind), mask=here)
        after = (left,)
        for back in tl.static_range(1, PASSES - 1):
            earlier = before[back - 1]
            if PACKED:
                earlier = tl.where(unbroken, earlier, 0.0)
            after = after + (earlier,)
        before = after
        start += CHUNK
        starts += CHUNK
        x += CHUNK * token_stride
        out += CHUNK * width
