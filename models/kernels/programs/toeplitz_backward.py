"""Triton programs for toeplitz.py's backward pass, over chunk streams as in the forward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .toeplitz import (
    dot_add,
    last_document_start,
    load_document_starts,
    load_inputs,
    load_matrices,
    max_starts,
    next_document_start,
    repeat_for_channels,
    token_mask,
    tokens_before,
)


@triton.jit
def _load_filter_grads(
    dy, x, dy_offsets, x_offsets, start, channel, end_channel, length,
    CHUNK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Load G = q ⊙ dy, the filter output's gradient, for the chunks at `start`."""
    mask = token_mask(start, channel, end_channel, length, CHUNK)
    filter_grad = tl.load(dy + dy_offsets, mask=mask, other=0.0)
    if GATED:
        q = tl.load(x + x_offsets, mask=mask, other=0.0).to(tl.float32)
        filter_grad = (filter_grad.to(tl.float32) * q).to(filter_grad.dtype)
    return filter_grad


@triton.jit
def _reload(x, mask):
    """Load again, from the cache, what was read before: keeping it would fill the registers."""
    return tl.load(x, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def program_streams(
    width, num_parts, chunks_per_stream,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, SIDE: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Return the program's group, row, part and first channel; by column the channel and the
    stream's first token; and the offset from there to the stream's last chunk."""
    num_columns = width // SHARE * BLOCKS
    group = tl.program_id(0) % num_columns // BLOCKS
    part = tl.program_id(0) // num_columns % num_parts
    row = (tl.program_id(0) // num_columns // num_parts).to(tl.int64)
    first_channel = group * SHARE + tl.program_id(0) % BLOCKS * SIDE
    column = tl.arange(0, CHUNKS * SIDE)[None, :]
    start = (part * CHUNKS + column // SIDE) * (chunks_per_stream * CHUNK)
    last_offset = (chunks_per_stream - 1) * CHUNK
    if HISTORY:
        last_offset -= (PASSES - 1) * CHUNK  # inputs before the row have gradients too
    return group, row, part, first_channel, first_channel + column % SIDE, start, last_offset


@triton.jit
def toeplitz_backward(
    dy, x, history, taps, skip, positions, grad_x, grad_history, block_sums, skip_grads, length,
    width, num_parts, chunks_per_stream,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """dW_n = Σ_p H_pᵀ·G_{n+p} + skip ⊙ G_n,  dh from Σ_n G_n·W_{n−p}ᵀ,  dskip = Σ G ⊙ W.

    G = q ⊙ dy; dq = dy ⊙ y, dk = dw ⊙ v, dv = dw ⊙ k. The streams run from their ends. `block_sums`
    receives Σ_n G_n·W_{n−p}ᵀ for p < SUMS, whose diagonals sum to the tap gradients;
    toeplitz_backward_far_sums computes the others. These sums take most registers, so all else is
    loaded again for each chunk, from the cache.
    """
    token_stride = width * (3 if GATED else 1)
    dtype = x.dtype.element_ty
    group, row, part, first_channel, channel, start, last_offset = program_streams(
        width, num_parts, chunks_per_stream, SHARE, BLOCKS, PASSES, CHUNK, CHUNKS, SIDE, HISTORY
    )
    end_channel = (group + 1) * SHARE
    time = tl.arange(0, CHUNK)[:, None]
    x_offsets = start.to(tl.int64) * token_stride + channel + time * token_stride
    dy_offsets = start.to(tl.int64) * width + channel + time * width
    start += last_offset
    stream_starts = (part * CHUNKS + tl.arange(0, CHUNKS)) * (
        chunks_per_stream * CHUNK
    ) + last_offset
    x += (row * length + last_offset) * token_stride
    dy += (row * length + last_offset) * width
    grad_x += (row * length + last_offset) * token_stride
    positions += row * length
    history += row * (REACH - 1) * width
    grad_history += row * (REACH - 1) * width
    matrices = load_matrices(taps + group * REACH, REACH, PASSES, CHUNK)
    skip_grad = tl.zeros([CHUNKS * SIDE], dtype=tl.float32)
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (tl.zeros([CHUNK, CHUNK], dtype=tl.float32),)

    visible_tokens = ()  # for each later chunk, how many tokens see this one
    linked = tl.full([CHUNKS], 1, tl.int32)
    for ahead in tl.static_range(1, PASSES):
        visible_tokens = visible_tokens + (linked * CHUNK,)
        if PACKED:
            document_starts = load_document_starts(
                positions, stream_starts + ahead * CHUNK, length, CHUNK
            )
            visible_tokens = visible_tokens[:-1] + (
                linked * next_document_start(document_starts, -1, CHUNK),
            )
            linked *= (visible_tokens[ahead - 1] == CHUNK).to(tl.int32)

    for _ in range(chunks_per_stream):
        mask = token_mask(start, channel, end_channel, length, CHUNK)
        filter_grad = _load_filter_grads(
            dy, x, dy_offsets, x_offsets, start, channel, end_channel, length, CHUNK, GATED
        )
        far_grad = filter_grad  # of tokens whose document reaches into earlier chunks
        if PACKED:
            document_starts = load_document_starts(positions, stream_starts, length, CHUNK)
            first_document_end = next_document_start(document_starts, -1, CHUNK)
            far_grad = tl.where(
                time < repeat_for_channels(first_document_end, CHUNKS, SIDE), filter_grad, 0.0
            )
            open_tokens = tokens_before(positions, start, length)

        y = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)  # the filtered row, recomputed
        new_sums = ()
        for back in tl.static_range(1, PASSES):
            w = load_inputs(
                x - (back * CHUNK) * token_stride, history, x_offsets, start - back * CHUNK,
                channel, end_channel, length, width, REACH, CHUNK, GATED, HISTORY,
            ).to(dtype)  # fmt: skip
            if PACKED:
                w = tl.where(time - back * CHUNK >= -open_tokens, w, 0.0)
            if GATED:
                y = dot_add(matrices[back], w, y, PRECISION)
            if back < SUMS:
                new_sums = new_sums + (dot_add(far_grad, tl.trans(w), sums[back], PRECISION),)
        w = load_inputs(
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
        diagonal_sum = sums[0]
        if PACKED:
            document_begin, document_end = tl.zeros([CHUNKS], tl.int32), first_document_end
            num_documents = max_starts(document_starts) + 1
            while num_documents > 0:
                end_mask = time < repeat_for_channels(document_end, CHUNKS, SIDE)
                document_mask = end_mask & (
                    time >= repeat_for_channels(document_begin, CHUNKS, SIDE)
                )
                document_inputs = tl.where(document_mask, w, 0.0)
                diagonal_sum = dot_add(
                    tl.where(document_mask, filter_grad, 0.0), tl.trans(document_inputs),
                    diagonal_sum, PRECISION,
                )  # fmt: skip
                if GATED:
                    y = tl.where(end_mask, dot_add(matrices[0], document_inputs, y, PRECISION), 0.0)
                document_begin, document_end = (
                    document_end,
                    next_document_start(document_starts, document_end[None, :], CHUNK),
                )
                num_documents -= 1
        else:
            diagonal_sum = dot_add(filter_grad, tl.trans(w), diagonal_sum, PRECISION)
            if GATED:
                y = dot_add(matrices[0], w, y, PRECISION)
        sums = (diagonal_sum,) + new_sums
        if SKIP:
            skip_scale = tl.load(skip + channel, mask=channel < end_channel, other=0.0).to(
                tl.float32
            )
            y += w.to(tl.float32) * skip_scale
            skip_grad += tl.sum(filter_grad.to(tl.float32) * w.to(tl.float32), axis=0)
        if GATED:
            y *= _reload(dy + dy_offsets, mask)
            tl.store(grad_x + x_offsets, y.to(dtype), mask=mask)

        w_grad = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)  # the gradient of w
        for ahead in tl.static_range(1, PASSES):
            later_grad = _load_filter_grads(
                dy + (ahead * CHUNK) * width, x + (ahead * CHUNK) * token_stride, dy_offsets,
                x_offsets, start + ahead * CHUNK, channel, end_channel, length, CHUNK, GATED,
            )  # fmt: skip
            if PACKED:
                later_grad = tl.where(
                    time < repeat_for_channels(visible_tokens[ahead - 1], CHUNKS, SIDE),
                    later_grad,
                    0.0,
                )
            w_grad = dot_add(tl.trans(matrices[ahead]), later_grad, w_grad, PRECISION)
        filter_grad = _load_filter_grads(
            dy, x, dy_offsets, x_offsets, start, channel, end_channel, length, CHUNK, GATED
        )
        if PACKED:
            document_begin, document_end = (
                last_document_start(document_starts, CHUNK),
                tl.full([CHUNKS], CHUNK, tl.int32),
            )
            num_documents = max_starts(document_starts) + 1
            while num_documents > 0:
                begin_mask = time >= repeat_for_channels(document_begin, CHUNKS, SIDE)
                document_mask = begin_mask & (
                    time < repeat_for_channels(document_end, CHUNKS, SIDE)
                )
                document_inputs = tl.where(document_mask, filter_grad, 0.0)
                w_grad = dot_add(tl.trans(matrices[0]), document_inputs, w_grad, PRECISION)
                w_grad = tl.where(begin_mask, w_grad, 0.0)
                document_begin, document_end = (
                    last_document_start(document_starts & (time < document_begin[None, :]), CHUNK),
                    document_begin,
                )
                num_documents -= 1
        else:
            w_grad = dot_add(tl.trans(matrices[0]), filter_grad, w_grad, PRECISION)
        if SKIP:
            skip_scale = tl.load(skip + channel, mask=channel < end_channel, other=0.0).to(
                tl.float32
            )
            w_grad += filter_grad.to(tl.float32) * skip_scale
        if GATED:
            k, v = _reload(x + width + x_offsets, mask), _reload(x + 2 * width + x_offsets, mask)
            tl.store(grad_x + width + x_offsets, (w_grad * v).to(dtype), mask=mask)
            tl.store(grad_x + 2 * width + x_offsets, (w_grad * k).to(dtype), mask=mask)
        else:
            tl.store(grad_x + dy_offsets, w_grad.to(dtype), mask=mask)
        if HISTORY:
            history_token = start + time + (REACH - 1)
            history_mask = (
                (channel < end_channel) & (history_token >= 0) & (history_token < REACH - 1)
            )
            tl.store(
                grad_history + history_token * width + channel,
                w_grad.to(history.dtype.element_ty),
                mask=history_mask,
            )
        if PACKED:
            linked = (first_document_end == CHUNK).to(tl.int32)
            next_visible = (first_document_end,)
            for ahead in tl.static_range(1, PASSES - 1):
                next_visible = next_visible + (linked * visible_tokens[ahead - 1],)
            visible_tokens = next_visible
        start -= CHUNK
        stream_starts -= CHUNK
        x -= CHUNK * token_stride
        dy -= CHUNK * width
        grad_x -= CHUNK * token_stride

    store_sums(block_sums, sums, 0, PASSES, CHUNK)
    if SKIP:
        channel_grads = tl.sum(tl.reshape(skip_grad, [CHUNKS, SIDE]), axis=0)
        document_inputs = first_channel + tl.arange(0, SIDE)
        tl.store(
            skip_grads + (row * num_parts + part) * width + document_inputs,
            channel_grads,
            mask=document_inputs < end_channel,
        )


@triton.jit
def toeplitz_backward_far_sums(
    dy, x, history, positions, block_sums, length, width, num_parts, chunks_per_stream,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Σ_n G_n·W_{n−p}ᵀ for p ≥ SUMS, which toeplitz_backward leaves out."""
    token_stride = width * (3 if GATED else 1)
    dtype = x.dtype.element_ty
    group, row, part, _, channel, start, last_offset = program_streams(
        width, num_parts, chunks_per_stream, SHARE, BLOCKS, PASSES, CHUNK, CHUNKS, SIDE, HISTORY
    )
    end_channel = (group + 1) * SHARE
    time = tl.arange(0, CHUNK)[:, None]
    x_offsets = start.to(tl.int64) * token_stride + channel + time * token_stride
    dy_offsets = start.to(tl.int64) * width + channel + time * width
    start += last_offset
    stream_starts = (part * CHUNKS + tl.arange(0, CHUNKS)) * (
        chunks_per_stream * CHUNK
    ) + last_offset
    x += (row * length + last_offset) * token_stride
    dy += (row * length + last_offset) * width
    positions += row * length
    history += row * (REACH - 1) * width
    sums = ()
    for _ in tl.static_range(SUMS, PASSES):
        sums = sums + (tl.zeros([CHUNK, CHUNK], dtype=tl.float32),)
    for _ in range(chunks_per_stream):
        far_grad = _load_filter_grads(
            dy, x, dy_offsets, x_offsets, start, channel, end_channel, length, CHUNK, GATED
        )
        if PACKED:
            first_document_end = next_document_start(
                load_document_starts(positions, stream_starts, length, CHUNK), -1, CHUNK
            )
            far_grad = tl.where(
                time < repeat_for_channels(first_document_end, CHUNKS, SIDE), far_grad, 0.0
            )
            open_tokens = tokens_before(positions, start, length)
        new_sums = ()
        for back in tl.static_range(SUMS, PASSES):
            w = load_inputs(
                x - (back * CHUNK) * token_stride, history, x_offsets, start - back * CHUNK,
                channel, end_channel, length, width, REACH, CHUNK, GATED, HISTORY,
            ).to(dtype)  # fmt: skip
            if PACKED:
                w = tl.where(time - back * CHUNK >= -open_tokens, w, 0.0)
            new_sums = new_sums + (dot_add(far_grad, tl.trans(w), sums[back - SUMS], PRECISION),)
        sums = new_sums
        start -= CHUNK
        stream_starts -= CHUNK
        x -= CHUNK * token_stride
        dy -= CHUNK * width
    store_sums(block_sums, sums, SUMS, PASSES, CHUNK)


@triton.jit
def store_sums(block_sums, sums, FROM: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr):
    """Store this program's block sums, for p from FROM on."""
    token = tl.arange(0, CHUNK)
    block_sums += tl.program_id(0).to(tl.int64) * (PASSES * CHUNK * CHUNK)
    for index in tl.static_range(len(sums)):
        ptrs = block_sums + ((FROM + index) * CHUNK + token[:, None]) * CHUNK + token[None, :]
        tl.store(ptrs, sums[index])
