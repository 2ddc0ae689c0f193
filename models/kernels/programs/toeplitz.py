"""Triton programs for toeplitz.py.

A program holds one group's filter as CHUNK × CHUNK matrices, H_p[t, s] = h[t − s + p·CHUNK], and
walks along the row's CHUNKS streams in parallel: the columns in its products are one chunk per
stream, with its channels.

Documents are kept apart by masking tokens in the products' inputs, never the matrices. Between
chunks only the document that spans them passes: tokens from its first to its last. Within a chunk
H₀ is multiplied once for each document, as often as the chunk with the most documents needs;
`document_begin` and `document_end` hold a number per stream. The loop over documents is a `while`:
Triton's compiler (3.6 and 3.9) compiles no `for` that masks a product's sum for sm_100.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_matrices(
    taps, REACH: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Return the PASSES matrices H_p[t, s] = h[t − s + p·CHUNK] of a group, [CHUNK, CHUNK] each."""
    token = tl.arange(0, CHUNK)
    matrices = ()
    for back in tl.static_range(PASSES):
        lag = token[:, None] - token[None, :] + back * CHUNK
        tap = tl.load(taps + lag, mask=(lag >= 0) & (lag < REACH), other=0.0)
        matrices = matrices + (tap,)
    return matrices


@triton.jit
def repeat_for_channels(stream_values, CHUNKS: tl.constexpr, SIDE: tl.constexpr):
    """Repeat each stream's number for its channels: [1, CHUNKS · SIDE]."""
    repeated = tl.broadcast_to(stream_values[:, None], [CHUNKS, SIDE])
    return tl.reshape(repeated, [CHUNKS * SIDE])[None, :]


@triton.jit
def load_document_starts(positions, first_token, length, CHUNK: tl.constexpr):
    """Return [CHUNK, CHUNKS]: true where a document begins, in the chunks at `first_token`.

    A row's first document may begin before the row.
    """
    token = first_token[None, :] + tl.arange(0, CHUNK)[:, None]
    position = tl.load(positions + tl.maximum(token, 0), mask=token < length, other=1)
    return position + tl.minimum(token, 0) == 0


@triton.jit
def tokens_before(positions, first_token, length):
    """Count the tokens before each chunk that belong to the document that continues in it."""
    position = tl.load(positions + tl.maximum(first_token, 0), mask=first_token < length, other=0)
    return position + tl.minimum(first_token, 0)


@triton.jit
def next_document_start(document_starts, after, CHUNK: tl.constexpr):
    """Return [CHUNKS]: the first document start behind token `after` of each chunk, or CHUNK."""
    token = tl.arange(0, CHUNK)[:, None]
    return tl.min(tl.where(document_starts & (token > after), token, CHUNK), axis=0)


@triton.jit
def last_document_start(document_starts, CHUNK: tl.constexpr):
    """Return [CHUNKS]: the last document start in each chunk, or 0."""
    token = tl.arange(0, CHUNK)[:, None]
    return tl.max(tl.where(document_starts, token, 0), axis=0)


@triton.jit
def dot_add(a, b, accumulator, PRECISION: tl.constexpr):
    """Return accumulator + a·b."""
    return tl.dot(a, b, accumulator, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def max_starts(document_starts):
    """Return the largest number of documents that begin in one chunk."""
    return tl.max(tl.sum(document_starts.to(tl.int32), axis=0), axis=0)


@triton.jit
def token_mask(start, channel, end_channel, length, CHUNK: tl.constexpr):
    """Mask tokens inside the row and channels in the group, [CHUNK, CHUNKS · SIDE]."""
    token = start + tl.arange(0, CHUNK)[:, None]
    return (channel < end_channel) & (token >= 0) & (token < length)


@triton.jit
def load_inputs(
    x, history, x_offsets, start, channel, end_channel, length, width,
    REACH: tl.constexpr, CHUNK: tl.constexpr, GATED: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Load w = k ⊙ v for the chunks at `start` (offsets into x); zeros outside the row."""
    mask = token_mask(start, channel, end_channel, length, CHUNK)
    if GATED:
        k = tl.load(x + width + x_offsets, mask=mask, other=0.0).to(tl.float32)
        w = k * tl.load(x + 2 * width + x_offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        w = tl.load(x + x_offsets, mask=mask, other=0.0).to(tl.float32)
    if HISTORY:
        history_token = start + tl.arange(0, CHUNK)[:, None] + (REACH - 1)
        history_mask = (channel < end_channel) & (history_token >= 0) & (history_token < REACH - 1)
        w += tl.load(history + history_token * width + channel, mask=history_mask, other=0.0).to(
            tl.float32
        )
    return w


@triton.jit
def toeplitz_forward(
    x, history, taps, skip, positions, out, length, width, row_stride, token_stride, num_parts,
    chunks_per_stream,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y_n = Σ_p H_p·W_{n−p},  out = q ⊙ (Y + skip ⊙ w),  w = k ⊙ v, with W_n a chunk of w.

    `earlier_inputs` are W_{n−1}, W_{n−2}, …, as far as this chunk sees them.
    """
    dtype = x.dtype.element_ty
    num_columns = width // SHARE * BLOCKS
    group = tl.program_id(0) % num_columns // BLOCKS
    part = tl.program_id(0) // num_columns % num_parts
    row = (tl.program_id(0) // num_columns // num_parts).to(tl.int64)
    end_channel = (group + 1) * SHARE
    column = tl.arange(0, CHUNKS * SIDE)[None, :]
    channel = group * SHARE + tl.program_id(0) % BLOCKS * SIDE + column % SIDE
    time = tl.arange(0, CHUNK)[:, None]
    stream_starts = (part * CHUNKS + tl.arange(0, CHUNKS)) * (chunks_per_stream * CHUNK)
    start = (part * CHUNKS + column // SIDE) * (chunks_per_stream * CHUNK)  # by column
    x_offsets = start.to(tl.int64) * token_stride + channel + time * token_stride
    out_offsets = start.to(tl.int64) * width + channel + time * width
    x += row * row_stride
    out += row * length * width
    positions += row * length
    history += row * (REACH - 1) * width
    matrices = load_matrices(taps + group * REACH, REACH, PASSES, CHUNK)
    if SKIP:
        skip_scale = tl.load(skip + channel, mask=channel < end_channel, other=0.0).to(tl.float32)
    earlier_inputs = ()  # W of earlier chunks, as far as this chunk sees it
    for back in tl.static_range(1, PASSES):
        w = load_inputs(
            x - (back * CHUNK) * token_stride, history, x_offsets, start - back * CHUNK, channel,
            end_channel, length, width, REACH, CHUNK, GATED, HISTORY,
        )  # fmt: skip
        if PACKED:
            open_tokens = tokens_before(positions, start, length)
            w = tl.where(time - back * CHUNK >= -open_tokens, w, 0.0)
        earlier_inputs = earlier_inputs + (w.to(dtype),)
    for _ in range(chunks_per_stream):
        inputs = load_inputs(
            x,
            history,
            x_offsets,
            start,
            channel,
            end_channel,
            length,
            width,
            REACH,
            CHUNK,
            GATED,
            HISTORY,
        ).to(dtype)
        y = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)
        for back in tl.static_range(1, PASSES):
            y = dot_add(matrices[back], earlier_inputs[back - 1], y, PRECISION)
        carried_inputs = inputs
        if PACKED:
            document_starts = load_document_starts(positions, stream_starts, length, CHUNK)
            document_begin, document_end = (
                tl.zeros([CHUNKS], tl.int32),
                next_document_start(document_starts, -1, CHUNK),
            )
            unbroken = repeat_for_channels(document_end, CHUNKS, SIDE) == CHUNK
            num_documents = max_starts(document_starts) + 1
            while num_documents > 0:
                end_mask = time < repeat_for_channels(document_end, CHUNKS, SIDE)
                document_inputs = tl.where(
                    end_mask & (time >= repeat_for_channels(document_begin, CHUNKS, SIDE)),
                    inputs,
                    0.0,
                )
                y = tl.where(end_mask, dot_add(matrices[0], document_inputs, y, PRECISION), 0.0)
                document_begin, document_end = (
                    document_end,
                    next_document_start(document_starts, document_end[None, :], CHUNK),
                )
                num_documents -= 1
            carried_inputs = tl.where(
                time
                >= repeat_for_channels(last_document_start(document_starts, CHUNK), CHUNKS, SIDE),
                inputs,
                0.0,
            )
        else:
            y = dot_add(matrices[0], inputs, y, PRECISION)
        if SKIP:
            y += inputs.to(tl.float32) * skip_scale
        mask = token_mask(start, channel, end_channel, length, CHUNK)
        if GATED:
            y *= tl.load(x + x_offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + out_offsets, y.to(dtype), mask=mask)
        next_inputs = (carried_inputs,)
        for back in tl.static_range(1, PASSES - 1):
            earlier_input = earlier_inputs[back - 1]
            if PACKED:
                earlier_input = tl.where(unbroken, earlier_input, 0.0)
            next_inputs = next_inputs + (earlier_input,)
        earlier_inputs = next_inputs
        start += CHUNK
        stream_starts += CHUNK
        x += CHUNK * token_stride
        out += CHUNK * width
