"""Next Triton program for toeplitz.py's backward pass, which no device has confirmed:
`kernels.toeplitz: next` runs it.

toeplitz_backward loads 17 tiles a chunk, most of them again and in the middle of the products, and
waits for each. A tile is small: here the inputs of earlier chunks and the gradients of later ones
stay in registers, and a chunk's four new tiles are loaded while the chunk behind it is computed.
The products are the same, in the same order, and so is each bit of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .toeplitz import (
    dot_add,
    last_document_start,
    load_document_starts,
    load_matrices,
    max_starts,
    next_document_start,
    repeat_for_channels,
    token_mask,
    tokens_before,
)
from .toeplitz_backward import program_streams, store_sums


@triton.jit
def _load_factors(
    x, history, x_offsets, start, channel, end_channel, length, width,
    REACH: tl.constexpr, CHUNK: tl.constexpr, GATED: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Load k, v and history, of which _multiply makes w, for the chunks at `start`. Placeholders
    without gates or history."""
    mask = token_mask(start, channel, end_channel, length, CHUNK)
    k = tl.load(x + (width if GATED else 0) + x_offsets, mask=mask, other=0.0)
    v = k
    if GATED:
        v = tl.load(x + 2 * width + x_offsets, mask=mask, other=0.0)
    past = k
    if HISTORY:
        history_token = start + tl.arange(0, CHUNK)[:, None] + (REACH - 1)
        history_mask = (channel < end_channel) & (history_token >= 0) & (history_token < REACH - 1)
        past = tl.load(history + history_token * width + channel, mask=history_mask, other=0.0)
    return k, v, past


@triton.jit
def _multiply(k, v, past, dtype: tl.constexpr, GATED: tl.constexpr, HISTORY: tl.constexpr):
    """Return w = k ⊙ v, and history before the row."""
    w = k.to(tl.float32)
    if GATED:
        w = w * v.to(tl.float32)
    if HISTORY:
        w += past.to(tl.float32)
    return w.to(dtype)


@triton.jit
def _load_grads(
    dy, x, dy_offsets, x_offsets, start, channel, end_channel, length,
    CHUNK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Load dy and q, or a placeholder, for the chunks at `start`."""
    mask = token_mask(start, channel, end_channel, length, CHUNK)
    dy_tile = tl.load(dy + dy_offsets, mask=mask, other=0.0)
    q = dy_tile
    if GATED:
        q = tl.load(x + x_offsets, mask=mask, other=0.0)
    return dy_tile, q


@triton.jit
def _multiply_grads(dy_tile, q, GATED: tl.constexpr):
    """Return G = q ⊙ dy, the filter output's gradient."""
    filter_grad = dy_tile
    if GATED:
        filter_grad = (dy_tile.to(tl.float32) * q.to(tl.float32)).to(dy_tile.dtype)
    return filter_grad


@triton.jit
def toeplitz_backward_carried(
    dy, x, history, taps, skip, positions, grad_x, grad_history, block_sums, skip_grads, length,
    width, num_parts, chunks_per_stream,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The arguments and results of toeplitz_backward.

    At chunk n, `inputs` are W_n, …, W_{n−PASSES+1} and `later_grads` G_{n+1}, …, G_{n+PASSES−1}.
    """
    token_stride = width * (3 if GATED else 1)
    dtype: tl.constexpr = x.dtype.element_ty
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
    skip_scale = tl.zeros([1, CHUNKS * SIDE], dtype=tl.float32)
    if SKIP:
        skip_scale += tl.load(skip + channel, mask=channel < end_channel, other=0.0).to(tl.float32)
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

    inputs = ()
    for back in tl.static_range(PASSES):
        k, v, past = _load_factors(
            x - (back * CHUNK) * token_stride, history, x_offsets, start - back * CHUNK, channel,
            end_channel, length, width, REACH, CHUNK, GATED, HISTORY,
        )  # fmt: skip
        inputs = inputs + (_multiply(k, v, past, dtype, GATED, HISTORY),)
    later_grads = ()
    for ahead in tl.static_range(1, PASSES):
        dy_tile, q = _load_grads(
            dy + (ahead * CHUNK) * width, x + (ahead * CHUNK) * token_stride, dy_offsets, x_offsets,
            start + ahead * CHUNK, channel, end_channel, length, CHUNK, GATED,
        )  # fmt: skip
        later_grads = later_grads + (_multiply_grads(dy_tile, q, GATED),)
    dy_tile, q = _load_grads(
        dy, x, dy_offsets, x_offsets, start, channel, end_channel, length, CHUNK, GATED
    )
    filter_grad = _multiply_grads(dy_tile, q, GATED)

    for _ in range(chunks_per_stream):
        mask = token_mask(start, channel, end_channel, length, CHUNK)
        next_factors = _load_factors(
            x - (PASSES * CHUNK) * token_stride, history, x_offsets, start - PASSES * CHUNK,
            channel, end_channel, length, width, REACH, CHUNK, GATED, HISTORY,
        )  # fmt: skip
        next_dy, next_q = _load_grads(
            dy - CHUNK * width, x - CHUNK * token_stride, dy_offsets, x_offsets, start - CHUNK,
            channel, end_channel, length, CHUNK, GATED,
        )  # fmt: skip
        k, v, _ = _load_factors(
            x, history, x_offsets, start, channel, end_channel, length, width, REACH, CHUNK, GATED,
            False,
        )  # fmt: skip
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
            w = inputs[back]
            if PACKED:
                w = tl.where(time - back * CHUNK >= -open_tokens, w, 0.0)
            if GATED:
                y = dot_add(matrices[back], w, y, PRECISION)
            if back < SUMS:
                new_sums = new_sums + (dot_add(far_grad, tl.trans(w), sums[back], PRECISION),)
        w = inputs[0]
        w_grad = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)  # the gradient of w
        for ahead in tl.static_range(1, PASSES):
            later_grad = later_grads[ahead - 1]
            if PACKED:
                later_grad = tl.where(
                    time < repeat_for_channels(visible_tokens[ahead - 1], CHUNKS, SIDE),
                    later_grad,
                    0.0,
                )
            w_grad = dot_add(tl.trans(matrices[ahead]), later_grad, w_grad, PRECISION)
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
                document_grads = tl.where(document_mask, filter_grad, 0.0)
                w_grad = dot_add(tl.trans(matrices[0]), document_grads, w_grad, PRECISION)
                w_grad = tl.where(begin_mask, w_grad, 0.0)
                document_begin, document_end = (
                    last_document_start(document_starts & (time < document_begin[None, :]), CHUNK),
                    document_begin,
                )
                num_documents -= 1
        else:
            diagonal_sum = dot_add(filter_grad, tl.trans(w), diagonal_sum, PRECISION)
            if GATED:
                y = dot_add(matrices[0], w, y, PRECISION)
            w_grad = dot_add(tl.trans(matrices[0]), filter_grad, w_grad, PRECISION)
        sums = (diagonal_sum,) + new_sums
        if SKIP:
            y += w.to(tl.float32) * skip_scale
            skip_grad += tl.sum(filter_grad.to(tl.float32) * w.to(tl.float32), axis=0)
            w_grad += filter_grad.to(tl.float32) * skip_scale
        if GATED:
            y *= dy_tile.to(tl.float32)
            tl.store(grad_x + x_offsets, y.to(dtype), mask=mask)
            k_grad, v_grad = w_grad * v.to(tl.float32), w_grad * k.to(tl.float32)
            tl.store(grad_x + width + x_offsets, k_grad.to(dtype), mask=mask)
            tl.store(grad_x + 2 * width + x_offsets, v_grad.to(dtype), mask=mask)
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
        later_grads = (filter_grad,) + later_grads[:-1]
        next_w = _multiply(*next_factors, dtype, GATED, HISTORY)
        inputs = inputs[1:] + (next_w,)
        dy_tile = next_dy
        filter_grad = _multiply_grads(next_dy, next_q, GATED)
        start -= CHUNK
        stream_starts -= CHUNK
        x -= CHUNK * token_stride
        dy -= CHUNK * width
        grad_x -= CHUNK * token_stride

    store_sums(block_sums, sums, 0, PASSES, CHUNK)
    if SKIP:
        channel_grads = tl.sum(tl.reshape(skip_grad, [CHUNKS, SIDE]), axis=0)
        channels = first_channel + tl.arange(0, SIDE)
        tl.store(
            skip_grads + (row * num_parts + part) * width + channels,
            channel_grads,
            mask=channels < end_channel,
        )
