"""Triton program of toeplitz.py's backward pass, over streams of chunks as in the forward pass."""

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
    grad, x, to, at, start, channel, last, length, CHUNK: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Load G, the gradients of the filter's output, of the chunks at `start`."""
    here = token_mask(start, channel, last, length, CHUNK)
    pulled = tl.load(grad + to, mask=here, other=0.0)
    if GATED:
        q = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        pulled = (pulled.to(tl.float32) * q).to(pulled.dtype)
    return pulled


@triton.jit
def _reload(x, here):
    """Load again, from the cache, what was read before: keeping it would fill the registers."""
    return tl.load(x, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _program_streams(
    width, parts, each, SHARE: tl.constexpr, BLOCKS: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Return the program's group, row, part and first channel; by column the channel and the first
    token of the stream; and the tokens from there to the stream's last chunk."""
    columns = width // SHARE * BLOCKS
    group = tl.program_id(0) % columns // BLOCKS
    part = tl.program_id(0) // columns % parts
    row = (tl.program_id(0) // columns // parts).to(tl.int64)
    first = group * SHARE + tl.program_id(0) % BLOCKS * SIDE
    column = tl.arange(0, CHUNKS * SIDE)[None, :]
    start = (part * CHUNKS + column // SIDE) * (each * CHUNK)
    down = (each - 1) * CHUNK
    if HISTORY:
        down -= (PASSES - 1) * CHUNK  # inputs before the row have gradients too
    return group, row, part, first, first + column % SIDE, start, down


@triton.jit
def toeplitz_backward(
    grad, x, history, taps, skip, positions, grad_x, grad_history, partial, grad_skip,
    length, width, parts, each,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Write the gradients. The streams run from their ends: the gradient of w mirrors `forward`.

    For the filter, `partial` receives Σ G_n·W_{n−p}ᵀ for the first SUMS of p, whose diagonals sum
    to the gradients of the taps; `far_sums` computes the others. These sums take most registers, so
    all else is read again for each chunk, from the cache.
    """
    token_stride = width * (3 if GATED else 1)
    kind = x.dtype.element_ty
    group, row, part, first, channel, start, down = _program_streams(
        width, parts, each, SHARE, BLOCKS, PASSES, CHUNK, CHUNKS, SIDE, HISTORY
    )
    last = (group + 1) * SHARE
    time = tl.arange(0, CHUNK)[:, None]
    at = start.to(tl.int64) * token_stride + channel + time * token_stride
    to = start.to(tl.int64) * width + channel + time * width
    start += down
    starts = (part * CHUNKS + tl.arange(0, CHUNKS)) * (each * CHUNK) + down
    x += (row * length + down) * token_stride
    grad += (row * length + down) * width
    grad_x += (row * length + down) * token_stride
    positions += row * length
    history += row * (REACH - 1) * width
    grad_history += row * (REACH - 1) * width
    matrices = load_matrices(taps + group * REACH, REACH, PASSES, CHUNK)
    skipped = tl.zeros([CHUNKS * SIDE], dtype=tl.float32)
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (tl.zeros([CHUNK, CHUNK], dtype=tl.float32),)

    sees = ()  # for each later chunk, how many tokens see this one
    linked = tl.full([CHUNKS], 1, tl.int32)
    for ahead in tl.static_range(1, PASSES):
        sees = sees + (linked * CHUNK,)
        if PACKED:
            begins = load_document_starts(positions, starts + ahead * CHUNK, length, CHUNK)
            sees = sees[:-1] + (linked * next_document_start(begins, -1, CHUNK),)
            linked *= (sees[ahead - 1] == CHUNK).to(tl.int32)

    for _ in range(each):
        here = token_mask(start, channel, last, length, CHUNK)
        g = _load_filter_grads(grad, x, to, at, start, channel, last, length, CHUNK, GATED)
        far = g  # its part that sees earlier chunks: of the document that spans both
        if PACKED:
            begins = load_document_starts(positions, starts, length, CHUNK)
            opened = next_document_start(begins, -1, CHUNK)
            far = tl.where(time < repeat_for_channels(opened, CHUNKS, SIDE), g, 0.0)
            open = tokens_before(positions, start, length)

        y = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)  # the filtered row, recomputed
        new = ()
        for back in tl.static_range(1, PASSES):
            w = load_inputs(
                x - (back * CHUNK) * token_stride, history, at, start - back * CHUNK, channel, last,
                length, width, REACH, CHUNK, GATED, HISTORY,
            ).to(kind)  # fmt: skip
            if PACKED:
                w = tl.where(time - back * CHUNK >= -open, w, 0.0)
            if GATED:
                y = dot_add(matrices[back], w, y, PRECISION)
            if back < SUMS:
                new = new + (dot_add(far, tl.trans(w), sums[back], PRECISION),)
        w = load_inputs(
            x, history, at, start, channel, last, length, width, REACH, CHUNK, GATED, HISTORY
        ).to(kind)
        met = sums[0]
        if PACKED:
            begin, end = tl.zeros([CHUNKS], tl.int32), opened
            documents = max_starts(begins) + 1
            while documents > 0:
                to_end = time < repeat_for_channels(end, CHUNKS, SIDE)
                inside = to_end & (time >= repeat_for_channels(begin, CHUNKS, SIDE))
                own = tl.where(inside, w, 0.0)
                met = dot_add(tl.where(inside, g, 0.0), tl.trans(own), met, PRECISION)
                if GATED:
                    y = tl.where(to_end, dot_add(matrices[0], own, y, PRECISION), 0.0)
                begin, end = end, next_document_start(begins, end[None, :], CHUNK)
                documents -= 1
        else:
            met = dot_add(g, tl.trans(w), met, PRECISION)
            if GATED:
                y = dot_add(matrices[0], w, y, PRECISION)
        sums = (met,) + new
        if SKIP:
            scale = tl.load(skip + channel, mask=channel < last, other=0.0).to(tl.float32)
            y += w.to(tl.float32) * scale
            skipped += tl.sum(g.to(tl.float32) * w.to(tl.float32), axis=0)
        if GATED:
            y *= _reload(grad + to, here)
            tl.store(grad_x + at, y.to(kind), mask=here)

        pulled = tl.zeros([CHUNK, CHUNKS * SIDE], dtype=tl.float32)  # the gradient of w
        for ahead in tl.static_range(1, PASSES):
            later = _load_filter_grads(
                grad + (ahead * CHUNK) * width, x + (ahead * CHUNK) * token_stride, to, at,
                start + ahead * CHUNK, channel, last, length, CHUNK, GATED,
            )  # fmt: skip
            if PACKED:
                later = tl.where(
                    time < repeat_for_channels(sees[ahead - 1], CHUNKS, SIDE), later, 0.0
                )
            pulled = dot_add(tl.trans(matrices[ahead]), later, pulled, PRECISION)
        g = _load_filter_grads(grad, x, to, at, start, channel, last, length, CHUNK, GATED)
        if PACKED:
            begin, end = last_document_start(begins, CHUNK), tl.full([CHUNKS], CHUNK, tl.int32)
            documents = max_starts(begins) + 1
            while documents > 0:
                from_begin = time >= repeat_for_channels(begin, CHUNKS, SIDE)
                inside = from_begin & (time < repeat_for_channels(end, CHUNKS, SIDE))
                own = tl.where(inside, g, 0.0)
                pulled = dot_add(tl.trans(matrices[0]), own, pulled, PRECISION)
                pulled = tl.where(from_begin, pulled, 0.0)
                begin, end = last_document_start(begins & (time < begin[None, :]), CHUNK), begin
                documents -= 1
        else:
            pulled = dot_add(tl.trans(matrices[0]), g, pulled, PRECISION)
        if SKIP:
            scale = tl.load(skip + channel, mask=channel < last, other=0.0).to(tl.float32)
            pulled += g.to(tl.float32) * scale
        if GATED:
            k, v = _reload(x + width + at, here), _reload(x + 2 * width + at, here)
            tl.store(grad_x + width + at, (pulled * v).to(kind), mask=here)
            tl.store(grad_x + 2 * width + at, (pulled * k).to(kind), mask=here)
        else:
            tl.store(grad_x + to, pulled.to(kind), mask=here)
        if HISTORY:
            place = start + time + (REACH - 1)
            before = (channel < last) & (place >= 0) & (place < REACH - 1)
            tl.store(
                grad_history + place * width + channel,
                pulled.to(history.dtype.element_ty),
                mask=before,
            )
        if PACKED:
            linked = (opened == CHUNK).to(tl.int32)
            still = (opened,)
            for ahead in tl.static_range(1, PASSES - 1):
                still = still + (linked * sees[ahead - 1],)
            sees = still
        start -= CHUNK
        starts -= CHUNK
        x -= CHUNK * token_stride
        grad -= CHUNK * width
        grad_x -= CHUNK * token_stride

    _store_sums(partial, sums, 0, PASSES, CHUNK)
    if SKIP:
        by_channel = tl.sum(tl.reshape(skipped, [CHUNKS, SIDE]), axis=0)
        own = first + tl.arange(0, SIDE)
        tl.store(grad_skip + (row * parts + part) * width + own, by_channel, mask=own < last)


@triton.jit
def toeplitz_backward_far_sums(
    grad, x, history, positions, partial, length, width, parts, each,
    SHARE: tl.constexpr, BLOCKS: tl.constexpr, REACH: tl.constexpr, PASSES: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIDE: tl.constexpr, GATED: tl.constexpr,
    SKIP: tl.constexpr, HISTORY: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Write to `partial` the sums that `backward` leaves out: those of p from SUMS on."""
    token_stride = width * (3 if GATED else 1)
    kind = x.dtype.element_ty
    group, row, part, _, channel, start, down = _program_streams(
        width, parts, each, SHARE, BLOCKS, PASSES, CHUNK, CHUNKS, SIDE, HISTORY
    )
    last = (group + 1) * SHARE
    time = tl.arange(0, CHUNK)[:, None]
    at = start.to(tl.int64) * token_stride + channel + time * token_stride
    to = start.to(tl.int64) * width + channel + time * width
    start += down
    starts = (part * CHUNKS + tl.arange(0, CHUNKS)) * (each * CHUNK) + down
    x += (row * length + down) * token_stride
    grad += (row * length + down) * width
    positions += row * length
    history += row * (REACH - 1) * width
    sums = ()
    for _ in tl.static_range(SUMS, PASSES):
        sums = sums + (tl.zeros([CHUNK, CHUNK], dtype=tl.float32),)
    for _ in range(each):
        far = _load_filter_grads(grad, x, to, at, start, channel, last, length, CHUNK, GATED)
        if PACKED:
            opened = next_document_start(
                load_document_starts(positions, starts, length, CHUNK), -1, CHUNK
            )
            far = tl.where(time < repeat_for_channels(opened, CHUNKS, SIDE), far, 0.0)
            open = tokens_before(positions, start, length)
        new = ()
        for back in tl.static_range(SUMS, PASSES):
            w = load_inputs(
                x - (back * CHUNK) * token_stride, history, at, start - back * CHUNK, channel, last,
                length, width, REACH, CHUNK, GATED, HISTORY,
            ).to(kind)  # fmt: skip
            if PACKED:
                w = tl.where(time - back * CHUNK >= -open, w, 0.0)
            new = new + (dot_add(far, tl.trans(w), sums[back - SUMS], PRECISION),)
        sums = new
        start -= CHUNK
        starts -= CHUNK
        x -= CHUNK * token_stride
        grad -= CHUNK * width
    _store_sums(partial, sums, SUMS, PASSES, CHUNK)


@triton.jit
def _store_sums(partial, sums, FROM: tl.constexpr, PASSES: tl.constexpr, CHUNK: tl.constexpr):
    side = tl.arange(0, CHUNK)
    partial += tl.program_id(0).to(tl.int64) * (PASSES * CHUNK * CHUNK)
    for number in tl.static_range(len(sums)):
        place = partial + ((FROM + number) * CHUNK + side[:, None]) * CHUNK + side[None, :]
        tl.store(place, sums[number])
