"""Triton programs of ssd.py's backward pass: the gradients of B, C, dt, A_log and D.

A pair of tokens s ≤ t of a document adds (C_t·B_s)·L_ts·Δ_s·x_s to y_t, with the decay
L_ts = exp(Σ_{s<r≤t} Δ_r·A). The product of this term with dy_t, the gradient of y_t, is

    P_ts = (dy_t·x_s)·(C_t·B_s)·L_ts·Δ_s

and all gradients are sums over pairs:

    d(C_t·B_s) = Σ_heads (dy_t·x_s)·L_ts·Δ_s
    dC_t = Σ_s d(C_t·B_s)·B_s,  dB_s = Σ_t d(C_t·B_s)·C_t
    dΔ_r = Σ_{t≥r} P_tr/Δ_r + A·Σ_{s<r≤t} P_ts,  dA = Σ_r Δ_r·Σ_{s<r≤t} P_ts

As in the forward pass, a chunk has CHUNK tokens, and a span CHUNKS chunks. A pair lies in one span,
or crosses a boundary between spans:

- ssd_backward_pairs computes the pairs in a span, chunk against chunk.
- ssd_backward_BC has one token of the pair in its span. The state S at the span's start stands for
  all tokens s before it, the gradient dS at its end for all tokens t after it.
- ssd_scan_states (ssd.py) has summed the pairs with s before and t after the whole span.

ssd_backward_dt adds up all three. B and C belong to groups of heads: a program sums over a block of
HEADS heads, and ssd_backward_sum_BC over the blocks of a group.

Sums by token are fp32: delta, dA_cumsum (as in ssd.py), D_terms, state_pairs_t and state_pairs_s
are [rows, heads, padded_length]; pair_sums_t and pair_sums_s [rows, distance, heads,
padded_length], with `distance` < CHUNKS, the chunks from s to t.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selective import softplus
from .ssd import decay_matrix, document_masks, dot_add, load_positions, load_tile, state_ptrs


@triton.jit
def _gap_decay(
    dA_cumsum, start_chunk, earlier_chunk, later_chunk, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return the decay over the chunks after earlier_chunk and before later_chunk, in the span that
    begins at start_chunk."""
    chunk = start_chunk + tl.arange(0, CHUNKS)
    end_ptrs = dA_cumsum + chunk * CHUNK + CHUNK - 1
    mask = (chunk > earlier_chunk) & (chunk < later_chunk)
    return tl.exp(tl.sum(tl.load(end_ptrs, mask=mask, other=0.0), axis=0))


@triton.jit
def _unbroken(positions, start_chunk, end_chunk, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return 1 if no document begins in the chunks [start_chunk, end_chunk), else 0."""
    unbroken = 1.0
    if PACKED:
        for chunk in range(start_chunk, end_chunk):
            _, _, chunk_unbroken = document_masks(positions, chunk * CHUNK, length, CHUNK, True)
            unbroken *= chunk_unbroken
    return unbroken


@triton.jit
def _edge_decay(dA_cumsum, first_token, mask, TO_END: tl.constexpr, CHUNK: tl.constexpr):
    """Return [CHUNK] the decay from a chunk's start to each token; if TO_END, from each token to
    the chunk's end; 0 where `mask` is False."""
    log_decay = tl.load(dA_cumsum + first_token + tl.arange(0, CHUNK))
    if TO_END:
        log_decay = tl.load(dA_cumsum + first_token + CHUNK - 1) - log_decay
    return tl.where(mask, tl.exp(log_decay), 0.0)


@triton.jit
def ssd_backward_pairs(
    dy, x, B, C, delta, dA_cumsum, positions, pair_sums_t, pair_sums_s, D_terms, score_grads,
    length, padded_length, num_heads, heads_per_group, head_dim, state_size, dy_row_stride,
    dy_token_stride, x_row_stride, x_token_stride,
    SAME: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d(C_t·B_s) = Σ_heads (dy_t·x_s)·L_ts·Δ_s for the tokens t of a chunk and s of the same chunk
    (SAME) or of the chunk `distance` before it.

    score_grads [rows, chunks, distance, blocks, t, s] are sums over HEADS heads. For each head and
    distance, pair_sums_s = Σ_t P_ts/Δ_s and pair_sums_t = Σ_s P_ts. SAME: pair_sums_t holds the sum
    over the chunk's pairs that enclose a token r, Σ_{s<r≤t} P_ts, and D_terms = dy_t·x_t.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    distance = 0 if SAME else tl.program_id(1) % (CHUNKS - 1) + 1
    block = tl.program_id(1) if SAME else tl.program_id(1) // (CHUNKS - 1)
    num_blocks = num_heads // HEADS
    head = block * HEADS
    dy += row * dy_row_stride + head * head_dim
    x += row * x_row_stride + head * head_dim
    B += row * x_row_stride + head // heads_per_group * state_size
    C += row * x_row_stride + head // heads_per_group * state_size
    positions += row * length
    delta += (row * num_heads + head) * padded_length
    dA_cumsum += (row * num_heads + head) * padded_length
    D_terms += (row * num_heads + head) * padded_length
    pair_sums_t += ((row * CHUNKS + distance) * num_heads + head) * padded_length
    pair_sums_s += ((row * CHUNKS + distance) * num_heads + head) * padded_length
    start_chunk = chunk // CHUNKS * CHUNKS
    chunk_s = chunk - distance
    token = tl.arange(0, CHUNK)
    if chunk_s >= start_chunk:
        first_t, first_s = chunk * CHUNK, chunk_s * CHUNK
        scores = tl.dot(
            load_tile(C, x_token_stride, first_t, length, state_size, CHUNK, STATE_SIZE),
            tl.trans(load_tile(B, x_token_stride, first_s, length, state_size, CHUNK, STATE_SIZE)),
            input_precision=PRECISION, out_dtype=tl.float32,
        )  # fmt: skip
        start_mask, _, _ = document_masks(positions, first_t, length, CHUNK, PACKED)
        _, end_mask, _ = document_masks(positions, first_s, length, CHUNK, PACKED)
        unbroken = _unbroken(positions, chunk_s + 1, chunk, length, CHUNK, PACKED)
        position_t = load_positions(positions, first_t, length, CHUNK, PACKED)
        score_grad = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)  # matrices are [t, s]
        for h in range(HEADS):
            head_offset = h * padded_length
            dy_tile = load_tile(
                dy + h * head_dim, dy_token_stride, first_t, length, head_dim, CHUNK, HEAD_DIM
            )
            x_tile = load_tile(
                x + h * head_dim, x_token_stride, first_s, length, head_dim, CHUNK, HEAD_DIM
            )
            dy_x = tl.dot(
                dy_tile, tl.trans(x_tile), input_precision=PRECISION, out_dtype=tl.float32,
            )  # fmt: skip
            if SAME:
                diagonal = tl.where(token[:, None] == token[None, :], dy_x, 0.0)
                tl.store(D_terms + head_offset + first_t + token, tl.sum(diagonal, 1))
                cumsum_t = tl.load(dA_cumsum + head_offset + first_t + token)
                dy_x_L = dy_x * decay_matrix(cumsum_t, position_t, CHUNK, PACKED, False)
            else:
                decay_ptr = dA_cumsum + head_offset
                gap = _gap_decay(decay_ptr, start_chunk, chunk_s, chunk, CHUNK, CHUNKS) * unbroken
                decay_to_t = _edge_decay(decay_ptr, first_t, start_mask, False, CHUNK) * gap
                dy_x_L = dy_x * decay_to_t[:, None]
                dy_x_L *= _edge_decay(decay_ptr, first_s, end_mask, True, CHUNK)[None, :]
            tl.store(pair_sums_s + head_offset + first_s + token, tl.sum(dy_x_L * scores, 0))
            head_score_grad = dy_x_L * tl.load(delta + head_offset + first_s + token)[None, :]
            score_grad += head_score_grad
            P = head_score_grad * scores
            if SAME:
                # Σ_{s<r} P_ts as a product with a matrix of ones, [t, r]; then the sum over t ≥ r.
                is_before = tl.where(token[:, None] < token[None, :], 1.0, 0.0).to(dtype)  # [s, r]
                P_before = tl.dot(
                    P.to(dtype), is_before, input_precision=PRECISION, out_dtype=tl.float32,
                )  # fmt: skip
                enclosing = tl.where(token[:, None] >= token[None, :], P_before, 0.0)
                tl.store(pair_sums_t + head_offset + first_t + token, tl.sum(enclosing, 0))
            else:
                tl.store(pair_sums_t + head_offset + first_t + token, tl.sum(P, 1))
        tile_index = (
            (row * tl.cdiv(length, CHUNK) + chunk) * CHUNKS + distance
        ) * num_blocks + block
        score_grad_ptrs = (
            score_grads + tile_index * CHUNK * CHUNK + token[:, None] * CHUNK + token[None, :]
        )
        tl.store(score_grad_ptrs, score_grad.to(dtype))


@triton.jit
def ssd_backward_BC(
    values, target, source, delta, dA_cumsum, positions, states, score_grads, state_pair_sums,
    partial_grads, length, padded_length, num_spans, num_heads, heads_per_group, head_dim,
    state_size, values_row_stride, values_token_stride, B_row_stride, B_token_stride,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dC_t = Σ_{s≤t} d(C_t·B_s)·B_s + Σ_heads decay_t·Sᵀ·dy_t, summed over HEADS heads.

    s is in the span, decay_t leads from the span's start to t, and S [head_dim, state_size] is the
    state at that start. state_pairs_t = C_t·(decay_t·Sᵀ·dy_t) = Σ_s P_ts over s before the span.

    BACKWARD: dB_s = Σ_{t≥s} d(C_t·B_s)·C_t + Σ_heads Δ_s·decay_s·dSᵀ·x_s, where decay_s leads from
    s to the span's end, and dS is the state's gradient there. state_pairs_s = B_s·(decay_s·dSᵀ·x_s)
    = Σ_t P_ts/Δ_s over t after the span.

                target   source   values   states   state_pair_sums
    forward     C        B        dy       S        state_pairs_t
    BACKWARD    B        C        x        dS       state_pairs_s

    partial_grads [blocks, rows, length, state_size] are fp32.
    """
    chunk, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = values.dtype.element_ty
    head = block * HEADS
    num_blocks = num_heads // HEADS
    first_token = chunk * CHUNK
    values += row * values_row_stride + head * head_dim
    target += row * B_row_stride + head // heads_per_group * state_size
    source += row * B_row_stride + head // heads_per_group * state_size
    delta += (row * num_heads + head) * padded_length + first_token
    dA_cumsum += (row * num_heads + head) * padded_length
    state_pair_sums += (row * num_heads + head) * padded_length + first_token
    positions += row * length
    num_chunks = tl.cdiv(length, CHUNK)
    start_chunk = chunk // CHUNKS * CHUNKS
    end_chunk = tl.minimum(start_chunk + CHUNKS, num_chunks)
    chunk_token = tl.arange(0, CHUNK)
    tile_offsets = chunk_token[:, None] * CHUNK + chunk_token[None, :]
    grad = tl.zeros([CHUNK, STATE_SIZE], dtype=tl.float32)
    for distance in range(end_chunk - chunk if BACKWARD else chunk - start_chunk + 1):
        chunk_t = chunk + distance if BACKWARD else chunk
        tile_index = ((row * num_chunks + chunk_t) * CHUNKS + distance) * num_blocks + block
        score_grad = tl.load(score_grads + tile_index * CHUNK * CHUNK + tile_offsets)
        first_source = (chunk_t if BACKWARD else chunk - distance) * CHUNK
        source_tile = load_tile(
            source, B_token_stride, first_source, length, state_size, CHUNK, STATE_SIZE
        )
        if BACKWARD:
            score_grad = tl.trans(score_grad)
        grad = dot_add(grad, score_grad, source_tile, PRECISION)
    earlier_chunk, later_chunk = start_chunk - 1, chunk
    if BACKWARD:
        earlier_chunk, later_chunk = chunk, end_chunk
    start_mask, end_mask, _ = document_masks(positions, first_token, length, CHUNK, PACKED)
    mask = end_mask if BACKWARD else start_mask
    unbroken = _unbroken(positions, earlier_chunk + 1, later_chunk, length, CHUNK, PACKED)
    target_tile = load_tile(
        target, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE
    )
    states += ((row * num_spans + chunk // CHUNKS) * num_heads + head) * head_dim * state_size
    for h in range(HEADS):
        head_offset = h * padded_length
        decay_ptr = dA_cumsum + head_offset
        gap = _gap_decay(decay_ptr, start_chunk, earlier_chunk, later_chunk, CHUNK, CHUNKS)
        gap *= unbroken
        decay = _edge_decay(decay_ptr, first_token, mask, BACKWARD, CHUNK) * gap
        value_tile = load_tile(
            values + h * head_dim, values_token_stride, first_token, length, head_dim, CHUNK,
            HEAD_DIM,
        )  # fmt: skip
        ptrs, state_mask = state_ptrs(
            states + h * head_dim * state_size, head_dim, state_size, HEAD_DIM, STATE_SIZE
        )
        decayed_value = (value_tile.to(tl.float32) * decay[:, None]).to(dtype)
        grad_by_state = tl.dot(
            decayed_value, tl.load(ptrs, mask=state_mask, other=0.0), input_precision=PRECISION,
            out_dtype=tl.float32,
        )  # fmt: skip
        pair_ptrs = state_pair_sums + head_offset + chunk_token
        tl.store(pair_ptrs, tl.sum(grad_by_state * target_tile.to(tl.float32), 1))
        if BACKWARD:
            grad_by_state *= tl.load(delta + head_offset + chunk_token)[:, None]
        grad += grad_by_state
    token = first_token + chunk_token[:, None]
    state_index = tl.arange(0, STATE_SIZE)[None, :]
    offsets = ((block * tl.num_programs(2) + row) * length + token) * state_size + state_index
    tl.store(partial_grads + offsets, grad, mask=(token < length) & (state_index < state_size))


@triton.jit(do_not_specialize=["num_blocks"])
def ssd_backward_sum_BC(
    partial_grads, out, length, num_blocks, state_size, out_row_stride, out_token_stride,
    CHUNK: tl.constexpr, STATE_SIZE: tl.constexpr,
):  # fmt: skip
    """Gradients of B and C [rows, length, 2 · groups · state_size] = Σ_blocks partial_grads.

    partial_grads [2 · groups · num_blocks, rows, length, state_size]; num_blocks are those of a
    group.
    """
    chunk, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    state_index = tl.arange(0, STATE_SIZE)[None, :]
    mask = (token < length) & (state_index < state_size)
    grad = tl.zeros([CHUNK, STATE_SIZE], dtype=tl.float32)
    for block in range(num_blocks):
        partial_row = (group * num_blocks + block) * tl.num_programs(2) + row
        ptrs = partial_grads + (partial_row * length + token) * state_size + state_index
        grad += tl.load(ptrs, mask=mask, other=0.0)
    out_ptrs = out + row * out_row_stride + token.to(tl.int64) * out_token_stride
    out_ptrs = out_ptrs + group * state_size + state_index
    tl.store(out_ptrs, grad.to(out.dtype.element_ty), mask=mask)


@triton.jit
def ssd_backward_dt(
    dt, dt_bias, A_log, delta, pair_sums_t, pair_sums_s, state_pairs_t, state_pairs_s, D_terms,
    spanning_pairs, grad_dt, param_grads, length, num_heads, padded_length, num_spans,
    num_state_blocks, dt_row_stride, dt_token_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Gradient of dt [rows, length, heads]; param_grads [rows · spans, 3, heads]: a span's sums of
    the gradients of dt_bias, A_log and D.

    Δ_r = softplus(dt_r + dt_bias) scales x_r, and the decay of every pair s < r ≤ t:

        dΔ_r = scale_grad_r + A·enclosing_r,  scale_grad_r = Σ_{t≥r} P_tr/Δ_r
        d(dt_r) = dΔ_r·softplus'(dt_r + dt_bias),  enclosing_r = Σ_{s<r≤t} P_ts
        d(dt_bias) = Σ_r d(dt_r),  dA_log = A·Σ_r Δ_r·enclosing_r,  dD = Σ_r dy_r·x_r

    The span's chunks are visited from the last to the first. By token of the chunk, `beginning_s`
    sums P over the pairs that leave the chunk (t in a later chunk or span), and `ending_t` over
    those that enter it (s in an earlier one). `crossing` sums P over all pairs that cross the
    chunk's end, whatever their tokens. A pair that encloses r

        lies in the chunk                       pair_sums_t at distance 0
        leaves it, from an s < r                Σ_{s<r} beginning_s
        enters it, to a t ≥ r                   Σ_{t≥r} ending_t
        encloses the chunk                      crossing − Σ_s beginning_s

    spanning_pairs [rows, spans, heads, state blocks] sum to the pairs that enclose the whole span.
    """
    span, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    head_mask = head < num_heads
    bias = tl.load(dt_bias + head, mask=head_mask, other=0.0).to(tl.float32)
    A = -tl.exp(tl.load(A_log + head, mask=head_mask, other=0.0).to(tl.float32))
    start_chunk = span * CHUNKS
    end_chunk = tl.minimum(start_chunk + CHUNKS, tl.cdiv(length, CHUNK))
    # At the span's end cross the pairs that enclose the span, and those that begin in it.
    crossing = tl.zeros([1, HEADS], dtype=tl.float32)
    for block in range(num_state_blocks):
        offsets = ((row * num_spans + span) * num_heads + head) * num_state_blocks + block
        crossing += tl.load(spanning_pairs + offsets, mask=head_mask, other=0.0)
    for chunk in range(start_chunk, end_chunk):
        token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        offsets = (row * num_heads + head) * padded_length + token
        beginning_s = tl.load(state_pairs_s + offsets, mask=head_mask, other=0.0)
        beginning_s *= tl.load(delta + offsets, mask=head_mask, other=0.0)
        crossing += tl.sum(beginning_s, axis=0)[None, :]
    grad_bias = tl.zeros([1, HEADS], dtype=tl.float32)
    grad_A = tl.zeros([1, HEADS], dtype=tl.float32)
    grad_D = tl.zeros([1, HEADS], dtype=tl.float32)
    for index in range(start_chunk, end_chunk):
        chunk = start_chunk + end_chunk - 1 - index
        token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        mask = (token < length) & head_mask
        offsets = (row * num_heads + head) * padded_length + token
        delta_t = tl.load(delta + offsets, mask=head_mask, other=0.0)
        pair_offsets = (row * CHUNKS * num_heads + head) * padded_length + token
        ending_t = tl.load(state_pairs_t + offsets, mask=head_mask, other=0.0)
        leaving_s = tl.load(state_pairs_s + offsets, mask=head_mask, other=0.0)  # Σ P_ts/Δ_s
        for distance in tl.static_range(1, CHUNKS):
            distance_offset = distance * num_heads * padded_length
            earlier_mask = head_mask & (token - distance * CHUNK >= start_chunk * CHUNK)
            later_mask = head_mask & (token + distance * CHUNK < end_chunk * CHUNK)
            ending_t += tl.load(
                pair_sums_t + pair_offsets + distance_offset, mask=earlier_mask, other=0.0
            )
            leaving_s += tl.load(
                pair_sums_s + pair_offsets + distance_offset, mask=later_mask, other=0.0
            )
        scale_grad = tl.load(pair_sums_s + pair_offsets, mask=head_mask, other=0.0) + leaving_s
        beginning_s = leaving_s * delta_t
        chunk_ending = tl.sum(ending_t, axis=0)[None, :]
        crossing -= tl.sum(beginning_s, axis=0)[None, :]  # now: the pairs that enclose the chunk
        enclosing = tl.load(pair_sums_t + pair_offsets, mask=head_mask, other=0.0) + crossing
        enclosing += tl.cumsum(beginning_s, axis=0) - beginning_s  # s < r in this chunk
        enclosing += chunk_ending - tl.cumsum(ending_t, axis=0) + ending_t  # t ≥ r in this chunk
        crossing += chunk_ending  # now: those that cross the end of the chunk before
        dt_offsets = token.to(tl.int64) * dt_token_stride + head
        _, slope = softplus(dt + row * dt_row_stride, dt_offsets, mask, bias)
        grad_dt_r = tl.where(mask, (scale_grad + enclosing * A) * slope, 0.0)
        dt_ptrs = grad_dt + (row * length + token) * num_heads + head
        tl.store(dt_ptrs, grad_dt_r.to(grad_dt.dtype.element_ty), mask=mask)
        grad_bias += tl.sum(grad_dt_r, axis=0)[None, :]
        grad_A += tl.sum(enclosing * delta_t, axis=0)[None, :]
        grad_D += tl.sum(tl.load(D_terms + offsets, mask=head_mask, other=0.0), axis=0)[None, :]
    param_ptrs = param_grads + (row * num_spans + span) * 3 * num_heads + head
    tl.store(param_ptrs, grad_bias, mask=head_mask)
    tl.store(param_ptrs + num_heads, grad_A * A, mask=head_mask)
    tl.store(param_ptrs + 2 * num_heads, grad_D, mask=head_mask)
