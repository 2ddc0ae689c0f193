"""Triton programs of modal.py.

A program processes CHANNELS channels of a chunk of a row, a tile at a time: BLOCKS blocks of BLOCK
tokens, which are the columns of matrix products. Each channel has matrices of its own:

    matrix [BLOCK, BLOCK]  the filter's first taps: from the tokens of a block to each other
    gather [MODES, BLOCK]  λ^{BLOCK−1−j}: from a block's tokens to the states
    spread [BLOCK, MODES]  λ^i: from the states, scaled by R·λ, to the block's tokens

and the states are scanned from block to block. The gradients of the inputs are the same filter, run
from the end over the gradients of the outputs: with the tokens of each block reversed, the matrices
are the same.

Document starts do not change the matrices; inputs and outputs are masked instead. The segments of a
block are numbered: nothing passes between two segments, the incoming state reaches the first, and
the outgoing state comes from the last.

The inputs of the next tile are read while a tile is processed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    decay_powers,
    document_segments,
    dot_add,
    dot_transposed_add,
    filter_block,
    load_matrix,
    load_modes,
    load_product,
    load_tile,
    program_chunk,
    repeat_for_parts,
    scan_blocks,
    select_segment,
    split_terms,
    store_modes,
    store_tile,
    tile_tokens,
)


@triton.jit
def modal_chunk_states(
    a, b, positions, rates, residues, added, length, width, each, chunks,
    a_row, a_stride, b_row, b_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr, CHANNELS: tl.constexpr, MODES: tl.constexpr,
    INPUTS: tl.constexpr, POWERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write each chunk's contribution to the states after it, from inputs a ⊙ b; if BACKWARD, to
    the gradients of the states before it. Tiles are aligned to the chunk's end on that side."""
    TOKENS: tl.constexpr = BLOCK * BLOCKS
    kind: tl.constexpr = a.dtype.element_ty
    row, number, start, end, channel = program_chunk(length, width, each, chunks, TOKENS, CHANNELS)
    a += row * a_row
    b += row * b_row
    positions += row * length
    rate = load_modes(rates, channel, width, MODES, PARTS)
    gather = split_terms(decay_powers(rate, BLOCK - 1 - tl.arange(0, BLOCK), False), kind, POWERS)
    fade = tl.exp(-rate * TOKENS)[:, :, None]
    at = tile_tokens(BLOCK, BLOCKS, BACKWARD)
    tiles = tl.cdiv(end - start, TOKENS)
    tile = start + (tiles - 1) * TOKENS if BACKWARD else end - tiles * TOKENS
    step = -TOKENS if BACKWARD else TOKENS
    sums = tl.zeros([CHANNELS * PARTS, MODES, BLOCKS], dtype=tl.float32)  # over all tiles, by block
    x = load_product(a, b, a_stride, b_stride, tile, at, start, end, channel, width, GATED)
    for _ in range(tiles):
        ahead = load_product(
            a, b, a_stride, b_stride, tile + step, at, start, end, channel, width, GATED
        )
        sums *= fade
        if PACKED:
            segment, count = document_segments(positions, tile, at, start, end, BACKWARD)
            begun = tl.sum(count, 0)
            segment += (tl.cumsum(count, 0) - count)[None, :]  # in the tile
            x = select_segment(x, segment, 0 if BACKWARD else begun, True)
            sums = tl.where(begun == 0, sums, 0.0)
        sums = dot_add(
            sums, gather, split_terms(repeat_for_parts(x, PARTS), kind, INPUTS), POWERS, INPUTS
        )
        x = ahead
        tile += step
    age = tl.arange(0, BLOCKS) if BACKWARD else BLOCKS - 1 - tl.arange(0, BLOCKS)
    state = tl.sum(sums * decay_powers(rate, BLOCK * age, False), 2)
    if BACKWARD:
        state *= tl.exp(-rate) * load_modes(residues, channel, width, MODES, PARTS)
    store_modes(added + number * MODES * PARTS * width, channel, width, state, MODES, PARTS)


@triton.jit
def modal_scan_states(
    states, start, chunk_decays, unbroken, end, chunks, numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the states after the last chunk to `end`; if WRITE, replace each chunk's contribution
    by the states at its start. `powers`: λ to the length of a chunk, and to that of the last."""
    parts = tl.cdiv(numbers, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    real = at < numbers  # MODES · width
    whole = tl.load(chunk_decays + at, mask=real, other=0.0)
    rest = tl.load(chunk_decays + numbers + at, mask=real, other=0.0)
    current = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        current += tl.load(start + row * numbers + at, mask=real, other=0.0)
    for block in range(tl.cdiv(chunks, AHEAD)):
        adds = ()
        keeps = ()
        for step in tl.static_range(AHEAD):  # all loads before the first use
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
def modal_forward(
    x, positions, rates, residues, taps, between, states, out,
    length, width, each, chunks, row_stride, stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr, CHANNELS: tl.constexpr, MODES: tl.constexpr, INPUTS: tl.constexpr,
    POWERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the outputs, and the states at each tile's start; `between` has those of each chunk."""
    TOKENS: tl.constexpr = BLOCK * BLOCKS
    kind: tl.constexpr = x.dtype.element_ty
    row, number, start, end, channel = program_chunk(length, width, each, chunks, TOKENS, CHANNELS)
    x += row * row_stride
    key = x + width if GATED else x
    value = x + 2 * width
    positions += row * length
    states += row * tl.cdiv(length, TOKENS) * MODES * PARTS * width
    out += row * length * width
    side = tl.arange(0, BLOCK)
    rate = load_modes(rates, channel, width, MODES, PARTS)
    weight = (tl.exp(-rate) * load_modes(residues, channel, width, MODES, PARTS))[:, :, None]
    fade = tl.exp(-rate * BLOCK)
    gather = split_terms(decay_powers(rate, BLOCK - 1 - side, False), kind, POWERS)
    spread = split_terms(decay_powers(rate, side, True), tl.float32, 2)
    matrix = split_terms(load_matrix(taps, channel, width, BLOCK), kind, 2)
    at = tile_tokens(BLOCK, BLOCKS, False)
    segment, count, most = at, tl.arange(0, BLOCKS), 0
    unbroken = tl.full([BLOCKS], 1.0, dtype=tl.float32)
    state = load_modes(between + number * MODES * PARTS * width, channel, width, MODES, PARTS)
    tile = start
    w = load_product(key, value, stride, stride, tile, at, start, end, channel, width, GATED)
    for _ in range(tl.cdiv(end - start, TOKENS)):
        ahead = load_product(
            key, value, stride, stride, tile + TOKENS, at, start, end, channel, width, GATED
        )
        if GATED:
            gate = load_tile(x, stride, tile, at, start, end, channel, width)
        own = states + (tile // TOKENS).to(tl.int64) * MODES * PARTS * width
        store_modes(own, channel, width, state, MODES, PARTS)
        if PACKED:
            segment, count = document_segments(positions, tile, at, start, end, False)
            unbroken = (count == 0).to(tl.float32)
            most = tl.max(count, 0)
        last = repeat_for_parts(select_segment(w, segment, count[None, :], PACKED), PARTS)
        last = split_terms(last, kind, INPUTS)
        added = tl.zeros([CHANNELS * PARTS, MODES, BLOCKS], dtype=tl.float32)
        added = dot_add(added, gather, last, POWERS, INPUTS)
        came, state = scan_blocks(
            added, fade, unbroken, state, CHANNELS * PARTS, MODES, BLOCKS, LEVELS, PACKED, False
        )
        y = filter_block(matrix, spread, w, came * weight, segment, 0, most, INPUTS, PACKED, PARTS)
        if GATED:
            y *= gate.to(tl.float32)
        store_tile(out, width, tile, at, end, channel, width, y)
        w = ahead
        tile += TOKENS


@triton.jit
def modal_backward(
    grad, x, positions, rates, residues, taps, states, between, grad_x, pairs, sums,
    length, width, each, chunks, row_stride, stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr, CHANNELS: tl.constexpr, MODES: tl.constexpr, INPUTS: tl.constexpr,
    POWERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the inputs and of the filter. `between`: the gradients of the states
    at each chunk's end.

    The filter's gradients are sums over pairs of an input w and a later p, the gradient of the
    filter's output. Pairs within a block go to `pairs`, by their places. Pairs across blocks go to
    `sums`: Σ λ^{lag−1}·w·p, by way of the states; and R·Σ lag·λ^lag·w·p, where a lag has three
    parts: from w to its block's end, the blocks between, and from there to p.
    """
    TOKENS: tl.constexpr = BLOCK * BLOCKS
    kind: tl.constexpr = x.dtype.element_ty
    row, number, start, end, channel = program_chunk(length, width, each, chunks, TOKENS, CHANNELS)
    x += row * row_stride
    key = x + width if GATED else x
    value = x + 2 * width
    positions += row * length
    states += row * tl.cdiv(length, TOKENS) * MODES * PARTS * width
    grad += row * length * width
    out_stride = width * (3 if GATED else 1)
    grad_x += row * length * out_stride
    side = tl.arange(0, BLOCK)
    rate = load_modes(rates, channel, width, MODES, PARTS)
    weight = (tl.exp(-rate) * load_modes(residues, channel, width, MODES, PARTS))[:, :, None]
    fade = tl.exp(-rate * BLOCK)
    gathers = decay_powers(rate, BLOCK - 1 - side, False)
    gather = split_terms(gathers, kind, POWERS)
    slopes = split_terms(gathers * (BLOCK - 1 - side)[None, None, :], kind, 2)
    spread = split_terms(decay_powers(rate, side, True), tl.float32, 2)
    matrix = split_terms(load_matrix(taps, channel, width, BLOCK), kind, 2)
    at = tile_tokens(BLOCK, BLOCKS, False)
    turned = tile_tokens(BLOCK, BLOCKS, True)
    segment, turned_segment, count, most = at, at, tl.arange(0, BLOCKS), 0
    unbroken = tl.full([BLOCKS], 1.0, dtype=tl.float32)
    nothing = tl.zeros([CHANNELS * PARTS, MODES, BLOCKS], dtype=tl.float32)
    met = tl.zeros([CHANNELS, BLOCK, BLOCK], dtype=tl.float32)
    decays = tl.zeros([CHANNELS * PARTS, MODES], dtype=tl.float32)
    lags = tl.zeros([CHANNELS * PARTS, MODES], dtype=tl.float32)
    tiles = tl.cdiv(end - start, TOKENS)
    tile = start + (tiles - 1) * TOKENS
    behind = load_modes(between + number * MODES * PARTS * width, channel, width, MODES, PARTS)
    adjoint = tl.where(tile + TOKENS == end, behind, 0.0)
    w = load_product(key, value, stride, stride, tile, at, start, end, channel, width, GATED)
    p = load_product(grad, x, width, stride, tile, turned, start, end, channel, width, GATED)
    for _ in range(tiles):
        next_w = load_product(
            key, value, stride, stride, tile - TOKENS, at, start, end, channel, width, GATED
        )
        next_p = load_product(
            grad, x, width, stride, tile - TOKENS, turned, start, end, channel, width, GATED
        )
        own = states + (tile // TOKENS).to(tl.int64) * MODES * PARTS * width
        state = load_modes(own, channel, width, MODES, PARTS)
        if PACKED:
            segment, count = document_segments(positions, tile, at, start, end, False)
            turned_segment, _ = document_segments(positions, tile, turned, start, end, True)
            unbroken = (count == 0).to(tl.float32)
            most = tl.max(count, 0)
            for part in range(most + 1):
                ours = split_terms(select_segment(w, segment, part, True), kind, INPUTS)
                theirs = split_terms(select_segment(p, turned_segment, part, True), kind, INPUTS)
                met = dot_transposed_add(met, theirs, ours, INPUTS)
        else:
            met = dot_transposed_add(
                met, split_terms(p, kind, INPUTS), split_terms(w, kind, INPUTS), INPUTS
            )

        last = repeat_for_parts(select_segment(w, segment, count[None, :], PACKED), PARTS)
        last = split_terms(last, kind, INPUTS)
        added = dot_add(nothing, gather, last, POWERS, INPUTS)
        came, _ = scan_blocks(
            added, fade, unbroken, state, CHANNELS * PARTS, MODES, BLOCKS, LEVELS, PACKED, False
        )
        if GATED:
            y = filter_block(
                matrix, spread, w, came * weight, segment, 0, most, INPUTS, PACKED, PARTS
            )
            y *= load_tile(grad, width, tile, at, start, end, channel, width).to(tl.float32)
            store_tile(grad_x, out_stride, tile, at, end, channel, width, y)

        first = repeat_for_parts(select_segment(p, turned_segment, 0, PACKED), PARTS)
        first = split_terms(first, kind, INPUTS)
        pulled = dot_add(nothing, gather, first, POWERS, INPUTS)
        # If the row ends within the tile, the block after its last holds the incoming gradients.
        after = (tl.arange(0, BLOCKS) == (end - tile) // BLOCK)[None, None, :]
        pulls = pulled * weight + tl.where(after, behind[:, :, None], 0.0)
        back, adjoint = scan_blocks(
            pulls, fade, unbroken, adjoint, CHANNELS * PARTS, MODES, BLOCKS, LEVELS, PACKED, True
        )
        decays += tl.sum(pulled * came, 2)
        from_w = dot_add(nothing, slopes, last, 2, INPUTS)
        to_p = dot_add(pulled, slopes, first, 2, INPUTS) * weight
        whole = BLOCK * fade[:, :, None] * unbroken[None, None, :]
        lags += tl.sum(from_w * back + whole * back * came + to_p * came, 2)

        dw = filter_block(
            matrix, spread, p, back, turned_segment, count[None, :], most, INPUTS, PACKED, PARTS
        )
        if GATED:
            k = load_tile(key, stride, tile, turned, start, end, channel, width).to(tl.float32)
            v = load_tile(value, stride, tile, turned, start, end, channel, width).to(tl.float32)
            store_tile(grad_x + width, out_stride, tile, turned, end, channel, width, dw * v)
            store_tile(grad_x + 2 * width, out_stride, tile, turned, end, channel, width, dw * k)
        else:
            store_tile(grad_x, out_stride, tile, turned, end, channel, width, dw)
        w = next_w
        p = next_p
        tile -= TOKENS
    cell = (side[:, None] * BLOCK + side[None, :])[None, :, :]
    channels = number * width + channel[:, None, None]
    there = (channel < width)[:, None, None]
    tl.store(pairs + channels * (BLOCK * BLOCK) + cell, met, mask=there)
    sums += number * 2 * MODES * PARTS * width
    store_modes(sums, channel, width, decays, MODES, PARTS)
    store_modes(sums + MODES * PARTS * width, channel, width, lags, MODES, PARTS)
