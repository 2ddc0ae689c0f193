"""Next Triton programs for ssd.py, which no device has confirmed: `kernels.ssd: next` runs them.

    S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t⊗B_t,  y_t = S_t·C_t + D·x_t

ssd_decays computes all that depends on dt alone, once a token and head. ssd_walk_states walks along
a row with a part of a head's state in registers and stores the state at each chunk's start.
ssd_chunk_outputs writes a chunk's outputs head by head: the scores C_t·B_s belong to all heads of a
group, and stay in registers. No program writes scores to memory.

A chunk begins at token k. In fp32 [rows, heads, padded_length]:

    log_decay_t      Σ_{k≤r≤t} Δ_r·A, in powers of two
    log_source_s     log_decay_s − log₂ Δ_s: exp2(log_decay_t − log_source_s) is Δ_s·L_ts
    target_weight_t  the decay from k to t; 0 if a document begins in between
    source_weight_s  Δ_s times the decay from s to the chunk's end; 0 in the same way

chunk_decays [rows, chunks, heads]; states [rows, chunks, heads, head_dim, state_size].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selective import softplus
from .ssd import document_masks, load_positions, load_tile

LOG2E = tl.constexpr(1.4426950408889634)
MIN_DELTA = tl.constexpr(1e-37)
"""Bound on Δ where its logarithm is taken; it is zero outside a row."""
MAX_LOG = tl.constexpr(64.0)
"""Bound on exponents of pairs outside the mask, which are multiplied by zero: 2^64 is finite."""


@triton.jit
def ssd_decays(
    dt, dt_bias, A_log, positions, delta, log_decay, log_source, target_weight, source_weight,
    chunk_decays, length, num_heads, padded_length, dt_row_stride, dt_token_stride,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Δ = softplus(dt + dt_bias), zero outside the row, and the decays of a chunk."""
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    head_mask = head < num_heads
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    bias = tl.load(dt_bias + head, mask=head_mask, other=0.0).to(tl.float32)
    delta_t, _ = softplus(
        dt + row * dt_row_stride, token.to(tl.int64) * dt_token_stride + head,
        (token < length) & head_mask, bias,
    )  # fmt: skip
    A = -tl.exp(tl.load(A_log + head, mask=head_mask, other=0.0).to(tl.float32)) * LOG2E
    log_t = tl.cumsum(delta_t * A, axis=0)
    log_end = tl.sum(delta_t * A, axis=0)[None, :]
    start_mask, end_mask, unbroken = document_masks(
        positions + row * length, chunk * CHUNK, length, CHUNK, PACKED
    )
    to_end = tl.where(end_mask[:, None], tl.exp2(log_end - log_t), 0.0)
    offsets = (row * num_heads + head) * padded_length + token
    tl.store(delta + offsets, delta_t, mask=head_mask)
    tl.store(log_decay + offsets, log_t, mask=head_mask)
    tl.store(log_source + offsets, log_t - tl.log2(tl.maximum(delta_t, MIN_DELTA)), mask=head_mask)
    from_start = tl.where(start_mask[:, None], tl.exp2(log_t), 0.0)
    tl.store(target_weight + offsets, from_start, mask=head_mask)
    tl.store(source_weight + offsets, delta_t * to_end, mask=head_mask)
    decay_ptrs = chunk_decays + (row * tl.num_programs(0) + chunk) * num_heads + head
    tl.store(decay_ptrs, tl.exp2(log_end) * unbroken, mask=head_mask)


@triton.jit
def ssd_walk_states(
    x, B, weights, chunk_decays, initial, states, final, forward_states, spanning_pairs, length,
    padded_length, num_chunks, num_heads, heads_per_group, head_dim, state_size, x_row_stride,
    x_token_stride, B_row_stride, B_token_stride,
    START: tl.constexpr, WRITE: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk along a row from `initial` (START) or zeros to `final`: S ← chunk_decay·S +
    Σ_s source_weight_s·x_s⊗B_s. WRITE stores S before each chunk.

    BACKWARD walks from the last chunk with the gradient: dS ← chunk_decay·dS +
    Σ_t target_weight_t·dy_t⊗C_t; x and B then hold dy and C. WRITE stores dS after each chunk, and
    chunk_decay·⟨dS, S⟩ with S from forward_states: the pairs (s, t) with s before and t after the
    chunk, [rows, chunks, heads, state blocks].
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    num_blocks = tl.num_programs(0)
    channel = tl.arange(0, HEAD_DIM)[:, None]
    state_index = block * STATE_BLOCK + tl.arange(0, STATE_BLOCK)[None, :]
    offsets = channel * state_size + state_index
    mask = (channel < head_dim) & (state_index < state_size)
    state_numbers = head_dim * state_size
    x += row * x_row_stride + head * head_dim
    B += row * B_row_stride + head // heads_per_group * state_size + block * STATE_BLOCK
    weights += (row * num_heads + head) * padded_length
    block_size = state_size - block * STATE_BLOCK
    edge_offset = (row * num_heads + head) * state_numbers
    state = tl.zeros([HEAD_DIM, STATE_BLOCK], dtype=tl.float32)
    if START:
        state += tl.load(initial + edge_offset + offsets, mask=mask, other=0.0)
    for index in range(num_chunks):
        chunk = num_chunks - 1 - index if BACKWARD else index
        first_token = chunk * CHUNK
        state_offset = (row * num_chunks + chunk) * num_heads + head
        decay = tl.load(chunk_decays + state_offset)
        if WRITE:
            out_ptrs = states + state_offset * state_numbers + offsets
            tl.store(out_ptrs, state.to(states.dtype.element_ty), mask=mask)
            if BACKWARD:
                ptrs = forward_states + state_offset * state_numbers + offsets
                terms = state * tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
                pair_sum = tl.sum(tl.sum(terms, axis=1), axis=0)
                tl.store(spanning_pairs + state_offset * num_blocks + block, pair_sum * decay)
        x_tile = load_tile(x, x_token_stride, first_token, length, head_dim, CHUNK, HEAD_DIM)
        B_tile = load_tile(B, B_token_stride, first_token, length, block_size, CHUNK, STATE_BLOCK)
        weight = tl.load(weights + first_token + tl.arange(0, CHUNK))
        weighted_x = tl.trans((x_tile.to(tl.float32) * weight[:, None]).to(dtype))
        state = tl.dot(weighted_x, B_tile, state * decay)
    tl.store(final + edge_offset + offsets, state, mask=mask)


@triton.jit
def pair_mask(
    positions, first_t, first_s, length,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return where s ≤ t are tokens of one document: [t, s], or [s, t] if BACKWARD."""
    token = tl.arange(0, BLOCK)
    position = load_positions(positions, first_t, length, BLOCK, PACKED)
    if BACKWARD:
        distance = first_t - first_s + token[None, :] - token[:, None]
        position = position[None, :]
    else:
        distance = first_t - first_s + token[:, None] - token[None, :]
        position = position[:, None]
    mask = distance >= 0
    if PACKED:
        mask = mask & (distance <= position)
    return mask


@triton.jit(do_not_specialize=["block_heads"])
def ssd_chunk_outputs(
    x, C, B, row_log, column_log, row_weight, D, positions, states, out, length, padded_length,
    num_chunks, block_heads, num_heads, heads_per_group, head_dim, state_size, x_row_stride,
    x_token_stride, B_row_stride, B_token_stride, out_row_stride, out_token_stride,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
):  # fmt: skip
    """y_t = Σ_{s≤t} (C_t·B_s)·Δ_s·L_ts·x_s + target_weight_t·S·C_t + D·x_t for block_heads heads,
    with S the state before the chunk; rows of the scores are t: row_log is log_decay, column_log
    log_source, row_weight target_weight.

    BACKWARD: dx_s = Σ_{t≥s} (C_t·B_s)·Δ_s·L_ts·dy_t + source_weight_s·dS·B_s + D·dy_s, with dS the
    gradient after the chunk; rows are s, so that the logs change places. x, C, B, states and
    row_weight hold dy, B, C, the gradients of the states and source_weight.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * block_heads
    dtype: tl.constexpr = x.dtype.element_ty
    first_token = chunk * CHUNK
    token = tl.arange(0, CHUNK)
    group_offset = row * B_row_stride + head // heads_per_group * state_size
    C_tile = load_tile(
        C + group_offset, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE
    )
    B_tile = load_tile(
        B + group_offset, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE
    )
    scores = tl.dot(C_tile, tl.trans(B_tile))
    mask = pair_mask(
        positions + row * length, first_token, first_token, length, PACKED, BACKWARD, CHUNK
    )
    scores = tl.where(mask, scores, 0.0)
    channel = tl.arange(0, HEAD_DIM)
    state_index = tl.arange(0, STATE_SIZE)
    state_offsets = channel[:, None] * state_size + state_index[None, :]
    state_mask = (channel[:, None] < head_dim) & (state_index[None, :] < state_size)
    tile_mask = (first_token + token[:, None] < length) & (channel[None, :] < head_dim)
    states += ((row * num_chunks + chunk) * num_heads + head) * head_dim * state_size
    x += row * x_row_stride + first_token.to(tl.int64) * x_token_stride + head * head_dim
    out += row * out_row_stride + first_token.to(tl.int64) * out_token_stride + head * head_dim
    token_offset = (row * num_heads + head) * padded_length + first_token
    row_log += token_offset
    column_log += token_offset
    row_weight += token_offset
    for h in range(block_heads):
        head_token = h * padded_length + token
        x_ptrs = x + h * head_dim + token[:, None] * x_token_stride + channel[None, :]
        x_tile = tl.load(x_ptrs, mask=tile_mask, other=0.0)
        state_ptrs = states + h * head_dim * state_size + state_offsets
        state = tl.load(state_ptrs, mask=state_mask, other=0.0)
        log_rows = tl.load(row_log + head_token)[:, None]
        log_columns = tl.load(column_log + head_token)[None, :]
        exponent = log_columns - log_rows if BACKWARD else log_rows - log_columns
        decayed_scores = scores * tl.exp2(tl.minimum(exponent, MAX_LOG))
        y = tl.dot(C_tile, tl.trans(state))
        y *= tl.load(row_weight + head_token)[:, None]
        y = tl.dot(decayed_scores.to(dtype), x_tile, y)
        y += tl.load(D + head + h).to(tl.float32) * x_tile.to(tl.float32)
        out_ptrs = out + h * head_dim + token[:, None] * out_token_stride + channel[None, :]
        tl.store(out_ptrs, y.to(out.dtype.element_ty), mask=tile_mask)
