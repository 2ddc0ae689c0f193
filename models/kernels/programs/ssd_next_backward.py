"""Next Triton programs of ssd.py's backward pass: the gradients of B, C, dt, A_log and D.

A pair of tokens s ≤ t of a document adds (C_t·B_s)·Δ_s·L_ts·x_s to y_t. Its product with dy_t is

    P_ts = (dy_t·x_s)·(C_t·B_s)·Δ_s·L_ts

and all gradients are sums over pairs, as in ssd_backward.py; here a span is one chunk:

- ssd_backward_scores has the pairs within a chunk. Their sums by s and by t come from the same
  rounded P, so that the diagonal cancels where both are subtracted.
- ssd_backward_states has one token of the pair in its chunk. The state S before the chunk stands
  for all tokens s before it, the gradient dS after it for all tokens t after it.
- ssd_walk_states (ssd_next.py) has summed the pairs with s before and t after the chunk.

ssd_backward_decays adds up all three. Sums by token are fp32 [rows, heads, padded_length].
"""

from __future__ import annotations

import triton
import triton.language as tl

from .selective import softplus
from .ssd import load_tile
from .ssd_next import MAX_LOG, MIN_DELTA, pair_mask


@triton.jit(do_not_specialize=["block_heads"])
def ssd_backward_scores(
    dy, x, B, C, log_decay, log_source, positions, sums_t, sums_s, D_sums, score_grads, length,
    padded_length, block_heads, num_heads, heads_per_group, head_dim, state_size, dy_row_stride,
    dy_token_stride, x_row_stride, x_token_stride,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
):  # fmt: skip
    """d(C_t·B_s) = Σ_heads (dy_t·x_s)·Δ_s·L_ts, summed over block_heads heads, for the tokens t and
    s of one half of a chunk, or t of its second and s of its first half: BLOCK tokens each.

    score_grads [rows, chunks, blocks, t, s] hold any number where pair_mask is false. For each
    head, sums_s = Σ_t P_ts and sums_t = Σ_s P_ts [2, rows, heads, padded_length], first those
    within a half; D_sums = Σ_t dy_t·x_t [rows, chunks, halves, heads].
    """
    chunk, row = tl.program_id(0) // 3, tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    part, block, num_blocks = tl.program_id(0) % 3, tl.program_id(1), tl.num_programs(1)
    num_chunks = tl.num_programs(0) // 3
    first_half = (part == 1).to(tl.int32)  # of s
    apart = (part == 2).to(tl.int32)
    first_s = chunk * CHUNK + first_half * BLOCK
    first_t = first_s + apart * BLOCK
    head = block * block_heads
    token = tl.arange(0, BLOCK)
    group_offset = row * x_row_stride + head // heads_per_group * state_size
    C_tile = load_tile(
        C + group_offset, x_token_stride, first_t, length, state_size, BLOCK, STATE_SIZE
    )
    B_tile = load_tile(
        B + group_offset, x_token_stride, first_s, length, state_size, BLOCK, STATE_SIZE
    )
    scores = tl.dot(C_tile, tl.trans(B_tile))
    mask = pair_mask(positions + row * length, first_t, first_s, length, PACKED, False, BLOCK)
    scores = tl.where(mask, scores, 0.0)
    dy += row * dy_row_stride + head * head_dim
    x += row * x_row_stride + head * head_dim
    log_decay += (row * num_heads + head) * padded_length + first_t
    log_source += (row * num_heads + head) * padded_length + first_s
    sums_offset = ((apart * tl.num_programs(2) + row) * num_heads + head) * padded_length
    sums_t += sums_offset + first_t
    sums_s += sums_offset + first_s
    D_sums += ((row * num_chunks + chunk) * 2 + first_half) * num_heads + head
    score_grad = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    ones = tl.full([BLOCK, 16], 1.0, dtype=dtype)
    for h in range(block_heads):
        head_token = h * padded_length + token
        dy_tile = load_tile(
            dy + h * head_dim, dy_token_stride, first_t, length, head_dim, BLOCK, HEAD_DIM
        )
        x_tile = load_tile(
            x + h * head_dim, x_token_stride, first_s, length, head_dim, BLOCK, HEAD_DIM
        )
        dy_x = tl.dot(
            dy_tile, tl.trans(x_tile)
        )  # fmt: skip
        if apart == 0:
            diagonal = tl.where(token[:, None] == token[None, :], dy_x, 0.0)
            tl.store(D_sums + h, tl.sum(tl.sum(diagonal, 1), 0))
        log_rows = tl.load(log_decay + head_token)[:, None]
        log_columns = tl.load(log_source + head_token)[None, :]
        dy_x *= tl.exp2(tl.minimum(log_rows - log_columns, MAX_LOG))
        score_grad += dy_x
        P = (dy_x * scores).to(dtype)
        by_t = tl.dot(P, ones)
        by_s = tl.dot(tl.trans(P), ones)
        tl.store(sums_t + head_token, tl.max(by_t, 1))
        tl.store(sums_s + head_token, tl.max(by_s, 1))
    tile_index = (row * num_chunks + chunk) * num_blocks + block
    score_grads += tile_index * CHUNK * CHUNK + (first_half + apart) * BLOCK * CHUNK
    ptrs = score_grads + first_half * BLOCK + token[:, None] * CHUNK + token[None, :]
    tl.store(ptrs, score_grad.to(dtype))


@triton.jit(do_not_specialize=["block_heads"])
def ssd_backward_states(
    values, target, source, weights, positions, states, score_grads, state_sums, partial_grads,
    length, padded_length, block_heads, num_heads, heads_per_group, head_dim, state_size,
    values_row_stride, values_token_stride, B_row_stride, B_token_stride,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
):  # fmt: skip
    """dC_t = Σ_{s≤t} d(C_t·B_s)·B_s + Σ_heads target_weight_t·Sᵀ·dy_t, summed over block_heads
    heads, with S the state before the chunk. state_sums_t = C_t·(target_weight_t·Sᵀ·dy_t) is Σ_s
    P_ts over s before the chunk.

    BACKWARD: dB_s = Σ_{t≥s} d(C_t·B_s)·C_t + Σ_heads source_weight_s·dSᵀ·x_s, with dS the gradient
    after the chunk. state_sums_s = B_s·(source_weight_s·dSᵀ·x_s) = Σ_t P_ts over t after the chunk.

                target   source   values   states   weights
    forward     C        B        dy       S        target_weight
    BACKWARD    B        C        x        dS       source_weight

    partial_grads [blocks, rows, length, state_size] are fp32.
    """
    chunk, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = values.dtype.element_ty
    num_chunks, num_blocks = tl.num_programs(0), tl.num_programs(1)
    head = block * block_heads
    first_token = chunk * CHUNK
    token = tl.arange(0, CHUNK)
    state_index = tl.arange(0, STATE_SIZE)
    group_offset = row * B_row_stride + head // heads_per_group * state_size
    tile_index = (row * num_chunks + chunk) * num_blocks + block
    mask = pair_mask(
        positions + row * length, first_token, first_token, length, PACKED, False, CHUNK
    )
    score_grad_ptrs = score_grads + tile_index * CHUNK * CHUNK + token[:, None] * CHUNK
    score_grad = tl.load(score_grad_ptrs + token[None, :], mask=mask, other=0.0)
    source_tile = load_tile(
        source + group_offset, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE
    )
    if BACKWARD:
        score_grad = tl.trans(score_grad)
    grad = tl.dot(
        score_grad, source_tile
    )  # fmt: skip
    target_tile = load_tile(
        target + group_offset, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE
    )
    values += row * values_row_stride + head * head_dim
    token_offset = (row * num_heads + head) * padded_length + first_token
    weights += token_offset
    state_sums += token_offset
    states += ((row * num_chunks + chunk) * num_heads + head) * head_dim * state_size
    channel = tl.arange(0, HEAD_DIM)[:, None]
    state_offsets = channel * state_size + state_index[None, :]
    state_mask = (channel < head_dim) & (state_index[None, :] < state_size)
    for h in range(block_heads):
        head_token = h * padded_length + token
        value_tile = load_tile(
            values + h * head_dim, values_token_stride, first_token, length, head_dim, CHUNK,
            HEAD_DIM,
        )  # fmt: skip
        state_ptrs = states + h * head_dim * state_size + state_offsets
        state = tl.load(state_ptrs, mask=state_mask, other=0.0)
        weight = tl.load(weights + head_token)[:, None]
        grad_by_state = tl.dot(
            (value_tile.to(tl.float32) * weight).to(dtype), state,
            out_dtype=tl.float32,
        )  # fmt: skip
        terms = grad_by_state * target_tile.to(tl.float32)
        tl.store(state_sums + head_token, tl.sum(terms, 1))
        grad += grad_by_state
    mask = (first_token + token[:, None] < length) & (state_index[None, :] < state_size)
    partial_row = (block * tl.num_programs(2) + row) * length + first_token
    ptrs = partial_grads + (partial_row + token[:, None]) * state_size + state_index[None, :]
    tl.store(ptrs, grad, mask=mask)


@triton.jit
def ssd_backward_decays(
    dt, dt_bias, A_log, delta, sums_t, sums_s, state_sums_t, state_sums_s, D_sums, spanning_pairs,
    grad_dt, param_grads, length, num_heads, padded_length, num_state_blocks, dt_row_stride,
    dt_token_stride,
    CHUNK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Gradient of dt [rows, length, heads]; param_grads [rows · chunks, 3, heads]: a chunk's sums
    of the gradients of dt_bias, A_log and D.

    Δ_r = softplus(dt_r + dt_bias) scales x_r, and the decay of every pair s < r ≤ t:

        dΔ_r = Σ_{t≥r} P_tr/Δ_r + A·Σ_{s<r≤t} P_ts

    A pair around r lies in the chunk, leaves it from an s < r, enters it to a t ≥ r, or encloses
    it. Pairs in the chunk around r are those with s < r without those with t < r.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    head_mask = head < num_heads
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    mask = (token < length) & head_mask
    bias = tl.load(dt_bias + head, mask=head_mask, other=0.0).to(tl.float32)
    A = -tl.exp(tl.load(A_log + head, mask=head_mask, other=0.0).to(tl.float32))
    chunk_offset = (row * tl.num_programs(0) + chunk) * num_heads + head
    enclosing = tl.zeros([CHUNK, HEADS], dtype=tl.float32)
    for block in range(num_state_blocks):
        ptrs = spanning_pairs + chunk_offset * num_state_blocks + block
        enclosing += tl.load(ptrs, mask=head_mask, other=0.0)
    offsets = (row * num_heads + head) * padded_length + token
    delta_t = tl.load(delta + offsets, mask=mask, other=0.0)
    entering_t = tl.load(state_sums_t + offsets, mask=mask, other=0.0)
    within_t = tl.load(sums_t + offsets, mask=mask, other=0.0)
    within_s = tl.load(sums_s + offsets, mask=mask, other=0.0)
    # Pairs of both halves.
    apart_offsets = tl.num_programs(2) * num_heads * padded_length + offsets
    later_half = token % CHUNK >= CHUNK // 2
    within_t += tl.load(sums_t + apart_offsets, mask=mask & later_half, other=0.0)
    within_s += tl.load(sums_s + apart_offsets, mask=mask & (later_half == 0), other=0.0)
    leaving_s = tl.load(state_sums_s + offsets, mask=mask, other=0.0)
    beginning_s = leaving_s + within_s
    difference = within_s - within_t
    enclosing += tl.cumsum(difference, axis=0) - difference
    enclosing += tl.cumsum(leaving_s, axis=0) - leaving_s
    enclosing += tl.sum(entering_t, axis=0)[None, :] - tl.cumsum(entering_t, axis=0) + entering_t
    scale_grad = tl.where(delta_t > 0.0, beginning_s / tl.maximum(delta_t, MIN_DELTA), 0.0)
    dt_offsets = token.to(tl.int64) * dt_token_stride + head
    _, slope = softplus(dt + row * dt_row_stride, dt_offsets, mask, bias)
    grad_dt_r = tl.where(mask, (scale_grad + enclosing * A) * slope, 0.0)
    dt_ptrs = grad_dt + (row * length + token) * num_heads + head
    tl.store(dt_ptrs, grad_dt_r.to(grad_dt.dtype.element_ty), mask=mask)
    grad_A = tl.sum(enclosing * delta_t, axis=0)[None, :] * A
    param_ptrs = param_grads + (row * tl.num_programs(0) + chunk) * 3 * num_heads + head
    tl.store(param_ptrs, tl.sum(grad_dt_r, axis=0)[None, :], mask=head_mask)
    tl.store(param_ptrs + num_heads, grad_A, mask=head_mask)
    D_ptrs = D_sums + (row * tl.num_programs(0) + chunk) * 2 * num_heads + head
    grad_D = tl.load(D_ptrs, mask=head_mask, other=0.0)
    grad_D += tl.load(D_ptrs + num_heads, mask=head_mask, other=0.0)
    tl.store(param_ptrs + 2 * num_heads, grad_D, mask=head_mask)
