"""Triton programs for modal.py.

A program processes CHANNELS channels in a row's chunk, a tile at a time: BLOCKS blocks of BLOCK
tokens, which are the columns in matrix products. The matrices, per channel:

    matrix [BLOCK, BLOCK]  the filter's first taps: from the tokens of a block to each other
    gather [MODES, BLOCK]  λ^{BLOCK−1−j}: from a block's tokens to the states
    spread [BLOCK, MODES]  λ^i: from the states, scaled by R·λ, to the block's tokens

and the states are scanned from block to block. The input gradients are the same filter, run from
the end over the output gradients: with the tokens in each block reversed, the matrices are the
same.

Document starts do not change the matrices; inputs and outputs are masked instead. A block's
segments are numbered: nothing passes between two segments, the incoming state reaches the first,
and the outgoing state comes from the last.

The next tile's inputs are read while a tile is processed.
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
    a, b, positions, rates, residues, contributions, length, width, tiles_per_chunk, num_chunks,
    a_row_stride, a_token_stride, b_row_stride, b_token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr, CHANNELS: tl.constexpr, MODES: tl.constexpr,
    INPUTS: tl.constexpr, POWERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Each chunk's contribution to the states at its end e: Σ_t λ^{e−t}·w_t,  w = a ⊙ b.

    BACKWARD: to the state gradients before its start k, R·Σ_t λ^{t−k+1}·p_t, with p = a ⊙ b the
    filter output's gradient. Tiles are aligned to the chunk's end on that side.
    """
    TOKENS: tl.constexpr = BLOCK * BLOCKS
    dtype: tl.constexpr = a.dtype.element_ty
    row, chunk, start, end, channel = program_chunk(
        length, width, tiles_per_chunk, num_chunks, TOKENS, CHANNELS
    )
    a += row * a_row_stride
    b += row * b_row_stride
    positions += row * length
    rate = load_modes(rates, channel, width, MODES, PARTS)
    gather = split_terms(decay_powers(rate, BLOCK - 1 - tl.arange(0, BLOCK), False), dtype, POWERS)
    tile_decay = tl.exp(-rate * TOKENS)[:, :, None]
    token = tile_tokens(BLOCK, BLOCKS, BACKWARD)
    num_tiles = tl.cdiv(end - start, TOKENS)
    tile = start + (num_tiles - 1) * TOKENS if BACKWARD else end - num_tiles * TOKENS
    step = -TOKENS if BACKWARD else TOKENS
    sums = tl.zeros([CHANNELS * PARTS, MODES, BLOCKS], dtype=tl.float32)  # over all tiles, by block
    x = load_product(
        a, b, a_token_stride, b_token_stride, tile, token, start, end, channel, width, GATED
    )
    for _ in range(num_tiles):
        next_x = load_product(
            a, b, a_token_stride, b_token_stride, tile + step, token, start, end, channel, width,
            GATED,
        )  # fmt: skip
        sums *= tile_decay
        if PACKED:
            segment, count = document_segments(positions, tile, token, start, end, BACKWARD)
            num_starts = tl.sum(count, 0)
            segment += (tl.cumsum(count, 0) - count)[None, :]  # in the tile
            x = select_segment(x, segment, 0 if BACKWARD else num_starts, True)
            sums = tl.where(num_starts == 0, sums, 0.0)
        sums = dot_add(
            sums, gather, split_terms(repeat_for_parts(x, PARTS), dtype, INPUTS), POWERS, INPUTS
        )
        x = next_x
        tile += step
    age = tl.arange(0, BLOCKS) if BACKWARD else BLOCKS - 1 - tl.arange(0, BLOCKS)
    state = tl.sum(sums * decay_powers(rate, BLOCK * age, False), 2)
    if BACKWARD:
        state *= tl.exp(-rate) * load_modes(residues, channel, width, MODES, PARTS)
    store_modes(contributions + chunk * MODES * PARTS * width, channel, width, state, MODES, PARTS)


@triton.jit
def modal_scan_states(
    states, initial, chunk_decays, unbroken, final, num_chunks, state_numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Scan over chunks: S ← λ^length·unbroken·S + contribution, from `initial` (START) or zeros.

    WRITE replaces each contribution in `states` by S at the chunk's start; `final` receives the
    last S. `chunk_decays` holds λ^(chunk length), also for the last chunk, which may be shorter.
    """
    num_blocks = tl.cdiv(state_numbers, BLOCK)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    offsets = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < state_numbers  # MODES · width
    chunk_decay = tl.load(chunk_decays + offsets, mask=mask, other=0.0)
    last_decay = tl.load(chunk_decays + state_numbers + offsets, mask=mask, other=0.0)
    state = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        state += tl.load(initial + row * state_numbers + offsets, mask=mask, other=0.0)
    for group in range(tl.cdiv(num_chunks, AHEAD)):
        loaded = ()
        decays = ()
        for index in tl.static_range(AHEAD):  # all loads before the first use
            chunk_index = tl.minimum(group * AHEAD + index, num_chunks - 1)
            chunk = row * num_chunks + (num_chunks - 1 - chunk_index if BACKWARD else chunk_index)
            loaded = loaded + (
                tl.load(states + chunk * state_numbers + offsets, mask=mask, other=0.0),
            )
            decay = tl.where(chunk == row * num_chunks + num_chunks - 1, last_decay, chunk_decay)
            decays = decays + (tl.load(unbroken + chunk) * decay,)
        for index in tl.static_range(AHEAD):
            chunk_index = group * AHEAD + index
            if chunk_index < num_chunks:
                if WRITE:
                    chunk = row * num_chunks + (
                        num_chunks - 1 - chunk_index if BACKWARD else chunk_index
                    )
                    tl.store(states + chunk * state_numbers + offsets, state, mask=mask)
                state = state * decays[index] + loaded[index]
    tl.store(final + row * state_numbers + offsets, state, mask=mask)


@triton.jit
def modal_forward(
    x, positions, rates, residues, taps, chunk_states, states, out, length, width, tiles_per_chunk,
    num_chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr, CHANNELS: tl.constexpr, MODES: tl.constexpr, INPUTS: tl.constexpr,
    POWERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """y_t = q_t·(Σ_{s≤t} taps[t−s]·w_s + Σ_n R_n·λ_n^{t−k+1}·S_n),  w = k ⊙ v, by block.

    s is in the block that begins at token k, S [MODES, CHANNELS] the state before it, and taps hold
    the filter's first BLOCK values with the skip. `chunk_states` holds S at chunk starts; `states`
    receives S at tile starts.
    """
    TOKENS: tl.constexpr = BLOCK * BLOCKS
    dtype: tl.constexpr = x.dtype.element_ty
    row, chunk, start, end, channel = program_chunk(
        length, width, tiles_per_chunk, num_chunks, TOKENS, CHANNELS
    )
    x += row * row_stride
    key = x + width if GATED else x
    value = x + 2 * width
    positions += row * length
    states += row * tl.cdiv(length, TOKENS) * MODES * PARTS * width
    out += row * length * width
    block_token = tl.arange(0, BLOCK)
    rate = load_modes(rates, channel, width, MODES, PARTS)
    weight = (tl.exp(-rate) * load_modes(residues, channel, width, MODES, PARTS))[:, :, None]
    block_decay = tl.exp(-rate * BLOCK)
    gather = split_terms(decay_powers(rate, BLOCK - 1 - block_token, False), dtype, POWERS)
    spread = split_terms(decay_powers(rate, block_token, True), tl.float32, 2)
    matrix = split_terms(load_matrix(taps, channel, width, BLOCK), dtype, 2)
    token = tile_tokens(BLOCK, BLOCKS, False)
    segment, count, last_segment = token, tl.arange(0, BLOCKS), 0
    unbroken = tl.full([BLOCKS], 1.0, dtype=tl.float32)
    state = load_modes(chunk_states + chunk * MODES * PARTS * width, channel, width, MODES, PARTS)
    tile = start
    w = load_product(
        key, value, token_stride, token_stride, tile, token, start, end, channel, width, GATED
    )
    for _ in range(tl.cdiv(end - start, TOKENS)):
        next_w = load_product(
            key, value, token_stride, token_stride, tile + TOKENS, token, start, end, channel,
            width, GATED,
        )  # fmt: skip
        if GATED:
            gate = load_tile(x, token_stride, tile, token, start, end, channel, width)
        tile_states = states + (tile // TOKENS).to(tl.int64) * MODES * PARTS * width
        store_modes(tile_states, channel, width, state, MODES, PARTS)
        if PACKED:
            segment, count = document_segments(positions, tile, token, start, end, False)
            unbroken = (count == 0).to(tl.float32)
            last_segment = tl.max(count, 0)
        last_inputs = repeat_for_parts(select_segment(w, segment, count[None, :], PACKED), PARTS)
        last_inputs = split_terms(last_inputs, dtype, INPUTS)
        contributions = tl.zeros([CHANNELS * PARTS, MODES, BLOCKS], dtype=tl.float32)
        contributions = dot_add(contributions, gather, last_inputs, POWERS, INPUTS)
        entering, state = scan_blocks(
            contributions, block_decay, unbroken, state, CHANNELS * PARTS, MODES, BLOCKS, LEVELS,
            PACKED, False,
        )  # fmt: skip
        y = filter_block(
            matrix, spread, w, entering * weight, segment, 0, last_segment, INPUTS, PACKED, PARTS
        )
        if GATED:
            y *= gate.to(tl.float32)
        store_tile(out, width, tile, token, end, channel, width, y)
        w = next_w
        tile += TOKENS


@triton.jit
def modal_backward(
    dy, x, positions, rates, residues, taps, states, chunk_grads, grad_x, pair_sums, state_sums,
    length, width, tiles_per_chunk, num_chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    LEVELS: tl.constexpr, CHANNELS: tl.constexpr, MODES: tl.constexpr, INPUTS: tl.constexpr,
    POWERS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dw_s = Σ_{t≥s} h_{t−s}·p_t,  dR = Σ λ^lag·w·p,  dλ from R·Σ lag·λ^lag·w·p,  p = q ⊙ dy.

    p is the filter output's gradient, and the sums are over pairs (w, p) with w at p's token or
    before. Pairs within a block go to `pair_sums`, by their places. Pairs across blocks go to
    `state_sums`: Σ λ^{lag−1}·w·p, by way of the states; and R·Σ lag·λ^lag·w·p, where a lag has
    three parts: from w to its block's end, the blocks between, and from there to p. `chunk_grads`
    holds the state gradients at chunk ends.
    """
    TOKENS: tl.constexpr = BLOCK * BLOCKS
    dtype: tl.constexpr = x.dtype.element_ty
    row, chunk, start, end, channel = program_chunk(
        length, width, tiles_per_chunk, num_chunks, TOKENS, CHANNELS
    )
    x += row * row_stride
    key = x + width if GATED else x
    value = x + 2 * width
    positions += row * length
    states += row * tl.cdiv(length, TOKENS) * MODES * PARTS * width
    dy += row * length * width
    out_stride = width * (3 if GATED else 1)
    grad_x += row * length * out_stride
    block_token = tl.arange(0, BLOCK)
    rate = load_modes(rates, channel, width, MODES, PARTS)
    weight = (tl.exp(-rate) * load_modes(residues, channel, width, MODES, PARTS))[:, :, None]
    block_decay = tl.exp(-rate * BLOCK)
    gather_powers = decay_powers(rate, BLOCK - 1 - block_token, False)
    gather = split_terms(gather_powers, dtype, POWERS)
    gather_slopes = split_terms(gather_powers * (BLOCK - 1 - block_token)[None, None, :], dtype, 2)
    spread = split_terms(decay_powers(rate, block_token, True), tl.float32, 2)
    matrix = split_terms(load_matrix(taps, channel, width, BLOCK), dtype, 2)
    token = tile_tokens(BLOCK, BLOCKS, False)
    reversed_token = tile_tokens(BLOCK, BLOCKS, True)
    segment, reversed_segment, count, last_segment = token, token, tl.arange(0, BLOCKS), 0
    unbroken = tl.full([BLOCKS], 1.0, dtype=tl.float32)
    zeros = tl.zeros([CHANNELS * PARTS, MODES, BLOCKS], dtype=tl.float32)
    pair_sum = tl.zeros([CHANNELS, BLOCK, BLOCK], dtype=tl.float32)
    decays = tl.zeros([CHANNELS * PARTS, MODES], dtype=tl.float32)
    lags = tl.zeros([CHANNELS * PARTS, MODES], dtype=tl.float32)
    num_tiles = tl.cdiv(end - start, TOKENS)
    tile = start + (num_tiles - 1) * TOKENS
    final_grad = load_modes(
        chunk_grads + chunk * MODES * PARTS * width, channel, width, MODES, PARTS
    )
    grad_state = tl.where(tile + TOKENS == end, final_grad, 0.0)
    w = load_product(
        key, value, token_stride, token_stride, tile, token, start, end, channel, width, GATED
    )
    p = load_product(
        dy, x, width, token_stride, tile, reversed_token, start, end, channel, width, GATED
    )
    for _ in range(num_tiles):
        next_w = load_product(
            key, value, token_stride, token_stride, tile - TOKENS, token, start, end, channel,
            width, GATED,
        )  # fmt: skip
        next_p = load_product(
            dy, x, width, token_stride, tile - TOKENS, reversed_token, start, end, channel, width,
            GATED,
        )  # fmt: skip
        tile_states = states + (tile // TOKENS).to(tl.int64) * MODES * PARTS * width
        state = load_modes(tile_states, channel, width, MODES, PARTS)
        if PACKED:
            segment, count = document_segments(positions, tile, token, start, end, False)
            reversed_segment, _ = document_segments(
                positions, tile, reversed_token, start, end, True
            )
            unbroken = (count == 0).to(tl.float32)
            last_segment = tl.max(count, 0)
            for index in range(last_segment + 1):
                w_terms = split_terms(select_segment(w, segment, index, True), dtype, INPUTS)
                p_terms = split_terms(
                    select_segment(p, reversed_segment, index, True), dtype, INPUTS
                )
                pair_sum = dot_transposed_add(pair_sum, p_terms, w_terms, INPUTS)
        else:
            pair_sum = dot_transposed_add(
                pair_sum, split_terms(p, dtype, INPUTS), split_terms(w, dtype, INPUTS), INPUTS
            )

        last_inputs = repeat_for_parts(select_segment(w, segment, count[None, :], PACKED), PARTS)
        last_inputs = split_terms(last_inputs, dtype, INPUTS)
        contributions = dot_add(zeros, gather, last_inputs, POWERS, INPUTS)
        entering, _ = scan_blocks(
            contributions, block_decay, unbroken, state, CHANNELS * PARTS, MODES, BLOCKS, LEVELS,
            PACKED, False,
        )  # fmt: skip
        if GATED:
            y = filter_block(
                matrix, spread, w, entering * weight, segment, 0, last_segment, INPUTS, PACKED,
                PARTS,
            )  # fmt: skip
            y *= load_tile(dy, width, tile, token, start, end, channel, width).to(tl.float32)
            store_tile(grad_x, out_stride, tile, token, end, channel, width, y)

        first_grads = repeat_for_parts(select_segment(p, reversed_segment, 0, PACKED), PARTS)
        first_grads = split_terms(first_grads, dtype, INPUTS)
        grad_contributions = dot_add(zeros, gather, first_grads, POWERS, INPUTS)
        # If the row ends within the tile, the block after its last holds the incoming gradients.
        final_mask = (tl.arange(0, BLOCKS) == (end - tile) // BLOCK)[None, None, :]
        scaled_grads = grad_contributions * weight + tl.where(
            final_mask, final_grad[:, :, None], 0.0
        )
        entering_grad, grad_state = scan_blocks(
            scaled_grads, block_decay, unbroken, grad_state, CHANNELS * PARTS, MODES, BLOCKS,
            LEVELS, PACKED, True,
        )  # fmt: skip
        decays += tl.sum(grad_contributions * entering, 2)
        from_w = dot_add(zeros, gather_slopes, last_inputs, 2, INPUTS)
        to_p = dot_add(grad_contributions, gather_slopes, first_grads, 2, INPUTS) * weight
        block_lag = BLOCK * block_decay[:, :, None] * unbroken[None, None, :]
        lags += tl.sum(
            from_w * entering_grad + block_lag * entering_grad * entering + to_p * entering, 2
        )

        dw = filter_block(
            matrix, spread, p, entering_grad, reversed_segment, count[None, :], last_segment,
            INPUTS, PACKED, PARTS,
        )  # fmt: skip
        if GATED:
            k = load_tile(key, token_stride, tile, reversed_token, start, end, channel, width).to(
                tl.float32
            )
            v = load_tile(value, token_stride, tile, reversed_token, start, end, channel, width).to(
                tl.float32
            )
            store_tile(
                grad_x + width, out_stride, tile, reversed_token, end, channel, width, dw * v
            )
            store_tile(
                grad_x + 2 * width, out_stride, tile, reversed_token, end, channel, width, dw * k
            )
        else:
            store_tile(grad_x, out_stride, tile, reversed_token, end, channel, width, dw)
        w = next_w
        p = next_p
        tile -= TOKENS
    pair_offsets = (block_token[:, None] * BLOCK + block_token[None, :])[None, :, :]
    channels = chunk * width + channel[:, None, None]
    mask = (channel < width)[:, None, None]
    tl.store(pair_sums + channels * (BLOCK * BLOCK) + pair_offsets, pair_sum, mask=mask)
    state_sums += chunk * 2 * MODES * PARTS * width
    store_modes(state_sums, channel, width, decays, MODES, PARTS)
    store_modes(state_sums + MODES * PARTS * width, channel, width, lags, MODES, PARTS)
