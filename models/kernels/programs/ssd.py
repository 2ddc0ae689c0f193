"""Triton programs for ssd.py: Δ, and the passes that run forward and backward alike.

    S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t⊗B_t,  y_t = S_t·C_t + D·x_t

A chunk has CHUNK tokens, a span CHUNKS chunks. A program walks along a span's chunks for one head
and keeps the state S [HEAD_DIM, STATE_SIZE] in registers; BACKWARD walks from the span's end and
scans the state gradient.

Within a chunk that begins at token k, dA_cumsum_t = Σ_{k≤r≤t} Δ_r·A. `decay_from_start` is
exp(dA_cumsum_t), `decay_to_end` the decay from t to the chunk's end; both are zero across a
document's start. In fp32: delta and dA_cumsum [rows, heads, padded_length], states, contributions
[rows, spans, heads, head_dim, state_size], span_decays [rows, spans, heads].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selective import softplus


@triton.jit
def ssd_delta(
    dt, dt_bias, A_log, delta, dA_cumsum, length, num_heads, padded_length, dt_row_stride,
    dt_token_stride,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Δ = softplus(dt + dt_bias), zero outside the row, and its cumulative sum Δ·A over a chunk."""
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    mask = (token < length) & (head < num_heads)
    bias = tl.load(dt_bias + head, mask=head < num_heads, other=0.0).to(tl.float32)
    delta_t, _ = softplus(
        dt + row * dt_row_stride, token.to(tl.int64) * dt_token_stride + head, mask, bias
    )
    A = -tl.exp(tl.load(A_log + head, mask=head < num_heads, other=0.0).to(tl.float32))
    offsets = (row * num_heads + head) * padded_length + token
    tl.store(delta + offsets, delta_t, mask=head < num_heads)
    tl.store(dA_cumsum + offsets, tl.cumsum(delta_t * A, axis=0), mask=head < num_heads)


@triton.jit
def document_masks(positions, first_token, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return where a token and the chunk's start are in one document, where a token and the
    chunk's end are, both [CHUNK], and 1 if no document begins in the chunk, else 0."""
    token = tl.arange(0, CHUNK)
    start_mask = token >= 0
    end_mask = token >= 0
    unbroken = 1.0
    if PACKED:
        position = tl.load(
            positions + first_token + token, mask=first_token + token < length, other=1
        ).to(tl.int32)
        last_start = tl.max(tl.where(position == 0, token, -1), axis=0)
        start_mask = position > token
        end_mask = token >= last_start
        unbroken = (last_start < 0).to(tl.float32)
    return start_mask, end_mask, unbroken


@triton.jit
def chunk_decays(
    delta, dA_cumsum, positions, first_token, length,
    CHUNK: tl.constexpr, SUM_TOKENS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return Δ, dA_cumsum, decay_to_end and decay_from_start [CHUNK], and the chunk's decay.

    Sums in memory begin anew every SUM_TOKENS tokens, those returned at the chunk's start.
    """
    token = tl.arange(0, CHUNK)
    delta_t = tl.load(delta + first_token + token)
    cumsum_t = tl.load(dA_cumsum + first_token + token)
    cumsum_end = tl.load(dA_cumsum + first_token + CHUNK - 1)
    if SUM_TOKENS > CHUNK:
        inside = first_token % SUM_TOKENS > 0
        cumsum_before = tl.load(dA_cumsum + first_token - 1, mask=inside, other=0.0)
        cumsum_t -= cumsum_before
        cumsum_end -= cumsum_before
    start_mask, end_mask, unbroken = document_masks(positions, first_token, length, CHUNK, PACKED)
    decay_to_end = tl.where(end_mask, tl.exp(cumsum_end - cumsum_t), 0.0)
    decay_from_start = tl.where(start_mask, tl.exp(cumsum_t), 0.0)
    return delta_t, cumsum_t, decay_to_end, decay_from_start, tl.exp(cumsum_end) * unbroken


@triton.jit
def load_positions(positions, first_token, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Load the positions of a chunk's tokens in their documents, if PACKED."""
    position = tl.arange(0, CHUNK)
    if PACKED:
        position = tl.load(
            positions + first_token + position, mask=first_token + position < length, other=0
        ).to(tl.int32)
    return position


@triton.jit
def decay_matrix(
    cumsum_t, position,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Return L_ts = exp(Σ_{s<r≤t} Δ_r·A) for tokens s ≤ t of a chunk and a document, else 0:
    [t, s], or [s, t] if BACKWARD."""
    token = tl.arange(0, CHUNK)
    distance = token[:, None] - token[None, :]
    log_decay = cumsum_t[:, None] - cumsum_t[None, :]
    if BACKWARD:
        distance, log_decay = -distance, -log_decay
    mask = distance >= 0
    if PACKED:
        if BACKWARD:
            mask = mask & (distance <= position[None, :])
        else:
            mask = mask & (distance <= position[:, None])
    return tl.exp(tl.where(mask, log_decay, float("-inf")))


@triton.jit
def load_tile(
    x, token_stride, first_token, length, width, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):
    """Load a chunk's tokens [CHUNK, WIDTH], with zeros outside the row."""
    token = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    mask = (first_token + token < length) & (column < width)
    return tl.load(
        x + first_token.to(tl.int64) * token_stride + token * token_stride + column,
        mask=mask,
        other=0.0,
    )


@triton.jit
def state_ptrs(states, head_dim, state_size, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr):
    """Return the pointers to a state [HEAD_DIM, STATE_SIZE], and their mask."""
    channel = tl.arange(0, HEAD_DIM)[:, None]
    state_index = tl.arange(0, STATE_SIZE)[None, :]
    return states + channel * state_size + state_index, (channel < head_dim) & (
        state_index < state_size
    )


@triton.jit
def dot_add(accumulator, a, b, PRECISION: tl.constexpr):
    """Return accumulator + a·b."""
    return tl.dot(a, b, accumulator, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def ssd_span_states(
    x, B, delta, dA_cumsum, positions, contributions, span_decays, length, padded_length, num_spans,
    num_heads, heads_per_group, head_dim, state_size, x_row_stride, x_token_stride, B_row_stride,
    B_token_stride,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum a span's contribution to the state at its end e, and write the span's decay.

    contribution = Σ_t exp(Σ_{t<r≤e} Δ_r·A)·Δ_t·x_t⊗B_t.  BACKWARD: the contribution to the gradient
    of the state before the span's start k, Σ_t exp(Σ_{k≤r≤t} Δ_r·A)·dy_t⊗C_t; x and B then hold dy
    and C.
    """
    span, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    x += row * x_row_stride + head * head_dim
    B += row * B_row_stride + head // heads_per_group * state_size
    delta += (row * num_heads + head) * padded_length
    dA_cumsum += (row * num_heads + head) * padded_length
    positions += row * length
    start_chunk = span * CHUNKS
    end_chunk = tl.minimum(start_chunk + CHUNKS, tl.cdiv(length, CHUNK))
    state = tl.zeros([HEAD_DIM, STATE_SIZE], dtype=tl.float32)
    span_decay = 1.0
    for index in range(start_chunk, end_chunk):
        first_token = (start_chunk + end_chunk - 1 - index if BACKWARD else index) * CHUNK
        delta_t, _, decay_to_end, decay_from_start, chunk_decay = chunk_decays(
            delta, dA_cumsum, positions, first_token, length, CHUNK, CHUNK, PACKED
        )
        x_tile = load_tile(x, x_token_stride, first_token, length, head_dim, CHUNK, HEAD_DIM).to(
            tl.float32
        )
        B_tile = load_tile(B, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE)
        token_weight = decay_from_start if BACKWARD else delta_t * decay_to_end
        weighted_x = tl.trans((x_tile * token_weight[:, None]).to(dtype))
        state = dot_add(state * chunk_decay, weighted_x, B_tile, PRECISION)
        span_decay *= chunk_decay
    span_offset = (row * num_spans + span) * num_heads + head
    out_ptrs, mask = state_ptrs(
        contributions + span_offset * head_dim * state_size, head_dim, state_size, HEAD_DIM,
        STATE_SIZE,
    )  # fmt: skip
    tl.store(out_ptrs, state, mask=mask)
    if not BACKWARD:
        tl.store(span_decays + span_offset, span_decay)


@triton.jit
def ssd_scan_states(
    contributions, states, initial, span_decays, final, forward_states, spanning_pairs, num_spans,
    num_heads, state_numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Scan over spans: S ← span_decay·S + contribution, from `initial` (START) or zeros to `final`.

    WRITE stores S at each span's start (BACKWARD: the gradient dS at its end) in `states`.
    BACKWARD walks from the last span and also writes span_decay·⟨dS, S⟩, with S from
    `forward_states`: the terms of the pairs (s, t) with s before and t after the span, summed over
    BLOCK numbers of the state.
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < state_numbers
    num_blocks = tl.num_programs(0)
    state = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        state += tl.load(
            initial + (row * num_heads + head) * state_numbers + offsets, mask=mask, other=0.0
        )
    for group in range(tl.cdiv(num_spans, AHEAD)):
        loaded = ()
        decays = ()
        forward_loaded = ()
        for index in tl.static_range(AHEAD):  # all loads before the first use
            span_index = tl.minimum(group * AHEAD + index, num_spans - 1)
            span = num_spans - 1 - span_index if BACKWARD else span_index
            span_offset = (row * num_spans + span) * num_heads + head
            ptrs = contributions + span_offset * state_numbers + offsets
            loaded = loaded + (tl.load(ptrs, mask=mask, other=0.0),)
            decays = decays + (tl.load(span_decays + span_offset),)
            if WRITE and BACKWARD:
                ptrs = forward_states + span_offset * state_numbers + offsets
                forward_loaded = forward_loaded + (tl.load(ptrs, mask=mask, other=0.0),)
        for index in tl.static_range(AHEAD):
            span_index = group * AHEAD + index
            if span_index < num_spans:
                if WRITE:
                    span = num_spans - 1 - span_index if BACKWARD else span_index
                    span_offset = (row * num_spans + span) * num_heads + head
                    stored = state.to(states.dtype.element_ty)
                    tl.store(states + span_offset * state_numbers + offsets, stored, mask=mask)
                    if BACKWARD:
                        pair_sum = tl.sum(state * forward_loaded[index].to(tl.float32), axis=0)
                        pair_ptr = spanning_pairs + span_offset * num_blocks + block
                        tl.store(pair_ptr, pair_sum * decays[index])
                state = state * decays[index] + loaded[index]
    tl.store(final + (row * num_heads + head) * state_numbers + offsets, state, mask=mask)


@triton.jit
def ssd_outputs(
    x, C, B, delta, dA_cumsum, D, positions, states, out, length, padded_length, num_spans,
    num_heads, heads_per_group, head_dim, state_size, x_row_stride, x_token_stride, B_row_stride,
    B_token_stride, out_row_stride, out_token_stride,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SUM_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y_t = Σ_{s≤t} (C_t·B_s)·L_ts·Δ_s·x_s + exp(dA_cumsum_t)·S·C_t + D·x_t, with S the state
    before the chunk.

    BACKWARD: dx_s = Δ_s·(Σ_{t≥s} (C_t·B_s)·L_ts·dy_t + decay_to_end_s·dS·B_s) + D·dy_s; x, C, B and
    states then hold dy, B, C and the gradients of the states.
    """
    span, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    x += row * x_row_stride + head * head_dim
    C += row * B_row_stride + head // heads_per_group * state_size
    B += row * B_row_stride + head // heads_per_group * state_size
    out += row * out_row_stride + head * head_dim
    delta += (row * num_heads + head) * padded_length
    dA_cumsum += (row * num_heads + head) * padded_length
    positions += row * length
    span_offset = (row * num_spans + span) * num_heads + head
    initial_ptrs, state_mask = state_ptrs(
        states + span_offset * head_dim * state_size, head_dim, state_size, HEAD_DIM, STATE_SIZE
    )
    state = tl.load(initial_ptrs, mask=state_mask, other=0.0).to(tl.float32)
    D_head = tl.load(D + head).to(tl.float32)
    start_chunk = span * CHUNKS
    end_chunk = tl.minimum(start_chunk + CHUNKS, tl.cdiv(length, CHUNK))
    for index in range(start_chunk, end_chunk):
        first_token = (start_chunk + end_chunk - 1 - index if BACKWARD else index) * CHUNK
        delta_t, cumsum_t, decay_to_end, decay_from_start, chunk_decay = chunk_decays(
            delta, dA_cumsum, positions, first_token, length, CHUNK, SUM_TOKENS, PACKED
        )
        C_tile = load_tile(C, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE)
        B_tile = load_tile(B, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE)
        scores = tl.dot(
            C_tile, tl.trans(B_tile), input_precision=PRECISION, out_dtype=tl.float32,
        )  # fmt: skip
        position = load_positions(positions, first_token, length, CHUNK, PACKED)
        scores *= decay_matrix(cumsum_t, position, CHUNK, PACKED, BACKWARD)
        if not BACKWARD:
            scores *= delta_t[None, :]
        y = tl.dot(
            C_tile, tl.trans(state.to(dtype)), input_precision=PRECISION, out_dtype=tl.float32,
        )  # fmt: skip
        y *= (decay_to_end if BACKWARD else decay_from_start)[:, None]
        x_tile = load_tile(x, x_token_stride, first_token, length, head_dim, CHUNK, HEAD_DIM)
        y = dot_add(y, scores.to(dtype), x_tile, PRECISION)
        if BACKWARD:
            y *= delta_t[:, None]
        y += D_head * x_tile.to(tl.float32)
        token = tl.arange(0, CHUNK)[:, None]
        channel = tl.arange(0, HEAD_DIM)[None, :]
        out_ptrs = (
            out + first_token.to(tl.int64) * out_token_stride + token * out_token_stride + channel
        )
        mask = (first_token + token < length) & (channel < head_dim)
        tl.store(out_ptrs, y.to(out.dtype.element_ty), mask=mask)
        token_weight = decay_from_start if BACKWARD else delta_t * decay_to_end
        weighted_x = tl.trans((x_tile.to(tl.float32) * token_weight[:, None]).to(dtype))
        state = dot_add(state * chunk_decay, weighted_x, B_tile, PRECISION)
