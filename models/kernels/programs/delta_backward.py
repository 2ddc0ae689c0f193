"""Triton programs for delta.py, backward.

Of (I + M)·D = R with R = β·(V − (e^G ⊙ K)·S) follow dR = (I + M)⁻ᵀ·dD and dM = −dR·Dᵀ. With Y, S
and letters as in programs/delta.py, dS the gradient of the state after a chunk:

    dD = Pᵀ·dY + (e^{G_end−G} ⊙ K)·dS,  dS ← e^{G_end} ⊙ dS + (e^G ⊙ Q)ᵀ·dY − Wᵀ·dD
    dP = dY·Dᵀ,  dV = β·dR,  dG = q ⊙ dq + k ⊙ (dk where e^{+G}) − k ⊙ (dk where e^{−G})
"""

from __future__ import annotations

import triton
import triton.language as tl

from .delta import (
    load_decays,
    load_key_decays,
    load_square,
    load_token,
    multiply,
    state_offsets,
    visible_pairs,
)
from .ssd import document_masks, load_tile


@triton.jit
def delta_backward_states(
    q, k, W, P, G, positions, dy, initial, state_grads, dD, final, length, padded_length,
    num_chunks, num_heads, heads_per_key, key_dim, value_dim, q_row_stride, q_token_stride,
    k_row_stride, k_token_stride,
    PACKED: tl.constexpr, BY_CHANNEL: tl.constexpr, START: tl.constexpr, WRITE: tl.constexpr,
    CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk from the last chunk with dS, from `initial` (START) or zeros to `final`. WRITE stores
    dS after each chunk and dD."""
    first_value = tl.program_id(0) * VALUES
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    head_row = row * num_heads + head
    q += row * q_row_stride + head // heads_per_key * key_dim
    k += row * k_row_stride + head // heads_per_key * key_dim
    decays = key_dim if BY_CHANNEL else 1
    G += head_row * padded_length * decays
    offsets, mask = state_offsets(value_dim, key_dim, first_value, KEY_DIM, VALUES)
    grad = tl.zeros([KEY_DIM, VALUES], dtype=tl.float32)
    if START:
        grad += tl.load(initial + head_row * key_dim * value_dim + offsets, mask=mask, other=0.0)
    for index in range(num_chunks):
        chunk = num_chunks - 1 - index
        first_token = chunk * CHUNK
        if WRITE:
            grad_ptrs = state_grads + (head_row * num_chunks + chunk) * key_dim * value_dim
            tl.store(grad_ptrs + offsets, grad.to(state_grads.dtype.element_ty), mask=mask)
        G_t = load_decays(G, first_token, key_dim, 0, CHUNK, KEY_DIM, BY_CHANNEL)
        G_end = load_key_decays(G, first_token + CHUNK - 1, key_dim, 0, KEY_DIM, BY_CHANNEL)
        start_mask, end_mask, unbroken = document_masks(
            positions + row * length, first_token, length, CHUNK, PACKED
        )
        dy_tile = load_tile(
            dy + (row * length * num_heads + head) * value_dim + first_value,
            num_heads * value_dim, first_token, length, value_dim - first_value, CHUNK, VALUES,
        )  # fmt: skip
        P_tile = load_square(P + (head_row * padded_length + first_token) * CHUNK, CHUNK)
        dD_tile = multiply(tl.trans(P_tile), dy_tile, PRECISION)
        k_tile = load_tile(k, k_token_stride, first_token, length, key_dim, CHUNK, KEY_DIM)
        to_end = tl.where(end_mask[:, None], tl.exp(G_end[None, :] - G_t), 0.0)
        dD_tile += multiply((k_tile * to_end).to(dtype), grad.to(dtype), PRECISION)
        if WRITE:
            tokens = head_row * padded_length + first_token + tl.arange(0, CHUNK)[:, None]
            value = first_value + tl.arange(0, VALUES)[None, :]
            tl.store(dD + tokens * value_dim + value, dD_tile.to(dtype), mask=value < value_dim)
        q_tile = load_tile(q, q_token_stride, first_token, length, key_dim, CHUNK, KEY_DIM)
        from_start = tl.where(start_mask[:, None], tl.exp(G_t), 0.0)
        W_tile = load_tile(
            W + head_row * padded_length * key_dim, key_dim, first_token, padded_length, key_dim,
            CHUNK, KEY_DIM,
        )  # fmt: skip
        grad = grad * (tl.exp(G_end) * unbroken)[:, None]
        grad += multiply(tl.trans((q_tile * from_start).to(dtype)), dy_tile, PRECISION)
        grad -= multiply(tl.trans(W_tile), dD_tile.to(dtype), PRECISION)
    tl.store(final + head_row * key_dim * value_dim + offsets, grad, mask=mask)


@triton.jit
def delta_backward_values(
    v, beta, inverses, D, dD, dy, dR, dv, dM, dP, dbeta, length, padded_length, num_heads,
    value_dim, v_row_stride, v_token_stride,
    CHUNK: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dR, dV, dM and dP, and V's part of dβ."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = v.dtype.element_ty
    first_token, head_row = chunk * CHUNK, row * num_heads + head
    token = tl.arange(0, CHUNK)
    padded = head_row * padded_length + first_token
    beta_t = tl.load(
        beta + (row * length + first_token + token) * num_heads + head,
        mask=first_token + token < length, other=0.0,
    )  # fmt: skip
    inverse = tl.trans(load_square(inverses + padded * CHUNK, CHUNK))
    queries = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    keys = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    beta_grad = tl.zeros([CHUNK], dtype=tl.float32)
    for first_value in range(0, value_dim, VALUES):
        value = first_value + tl.arange(0, VALUES)[None, :]
        offsets = (padded + token[:, None]) * value_dim + value
        mask = value < value_dim
        dD_tile = tl.load(dD + offsets, mask=mask, other=0.0)
        D_tile = tl.trans(tl.load(D + offsets, mask=mask, other=0.0))
        dR_tile = multiply(inverse, dD_tile, PRECISION)
        tl.store(dR + offsets, dR_tile.to(dtype), mask=mask)
        v_tile = load_tile(
            v + row * v_row_stride + head * value_dim + first_value, v_token_stride, first_token,
            length, value_dim - first_value, CHUNK, VALUES,
        )  # fmt: skip
        beta_grad += tl.sum(dR_tile * v_tile, axis=1)
        outputs = ((row * length + first_token + token[:, None]) * num_heads + head) * value_dim
        out_mask = mask & (first_token + token[:, None] < length)
        dv_tile = (dR_tile * beta_t[:, None]).to(dtype)
        tl.store(dv + outputs + value, dv_tile, mask=out_mask)
        dy_tile = tl.load(dy + outputs + value, mask=out_mask, other=0.0)
        queries += multiply(dy_tile, D_tile, PRECISION)
        keys -= multiply(dR_tile.to(dtype), D_tile, PRECISION)
    pairs = padded * CHUNK + token[:, None] * CHUNK + token[None, :]
    tl.store(dP + pairs, queries)
    tl.store(dM + pairs, keys)
    tl.store(dbeta + padded + token, beta_grad)


@triton.jit
def delta_backward_pairs(
    q, k, G, positions, dM, dP, dq_pairs, dk_rows, dk_columns, beta, length, padded_length,
    num_heads, heads_per_key, key_dim, q_row_stride, q_token_stride, k_row_stride, k_token_stride,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients through the scores of BLOCK tokens with a decay for each channel, [rows, heads,
    padded_length, key_dim]: of q, of k as the later token of a pair without its β, and of k as the
    earlier one."""
    block, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, first_channel = tl.program_id(1) % num_heads, tl.program_id(1) // num_heads * CHANNELS
    chunk_token = block * BLOCK // CHUNK * CHUNK
    first_token = block * BLOCK
    start = first_token - chunk_token
    dtype: tl.constexpr = q.dtype.element_ty
    head_row = row * num_heads + head
    channels = key_dim - first_channel
    q += row * q_row_stride + head // heads_per_key * key_dim + first_channel
    k += row * k_row_stride + head // heads_per_key * key_dim + first_channel
    G += head_row * padded_length * key_dim
    beta += row * length * num_heads + head
    positions += row * length
    token, channel = tl.arange(0, BLOCK), tl.arange(0, CHANNELS)
    G_t = load_decays(G, first_token, key_dim, first_channel, BLOCK, CHANNELS, True)
    before = load_key_decays(G, first_token, key_dim, first_channel, CHANNELS, True)[None, :]
    after = load_key_decays(
        G, first_token + BLOCK - 1, key_dim, first_channel, CHANNELS, True
    )[None, :]  # fmt: skip
    dq_tile = tl.zeros([BLOCK, CHANNELS], dtype=tl.float32)
    row_tile = tl.zeros([BLOCK, CHANNELS], dtype=tl.float32)
    column_tile = tl.zeros([BLOCK, CHANNELS], dtype=tl.float32)
    pair_rows = (head_row * padded_length + chunk_token) * CHUNK
    for pair_block in range(CHUNK // BLOCK):
        pair_token = chunk_token + pair_block * BLOCK
        if pair_block * BLOCK != start:
            k_s = load_tile(k, k_token_stride, pair_token, length, channels, BLOCK, CHANNELS)
            G_s = load_decays(G, pair_token, key_dim, first_channel, BLOCK, CHANNELS, True)
            if pair_block * BLOCK < start:  # this block is the later one
                distance = start + token[:, None] - pair_block * BLOCK - token[None, :]
                position = load_block_positions(positions, first_token, length, BLOCK, PACKED)
                mask = distance <= position[:, None] if PACKED else distance > 0
                pairs = pair_rows + (start + token[:, None]) * CHUNK + pair_block * BLOCK
                pairs += token[None, :]
                keys = (k_s * tl.exp(before - G_s)).to(dtype)
                dP_tile = tl.where(mask, tl.load(dP + pairs), 0.0).to(dtype)
                dM_tile = tl.where(mask, tl.load(dM + pairs), 0.0).to(dtype)
                dq_tile += multiply(dP_tile, keys, PRECISION)
                row_tile += multiply(dM_tile, keys, PRECISION)
            else:
                q_s = load_tile(q, q_token_stride, pair_token, length, channels, BLOCK, CHANNELS)
                distance = pair_block * BLOCK + token[None, :] - start - token[:, None]
                position = load_block_positions(positions, pair_token, length, BLOCK, PACKED)
                mask = distance <= position[None, :] if PACKED else distance > 0
                pairs = pair_rows + (pair_block * BLOCK + token[None, :]) * CHUNK + start
                pairs += token[:, None]
                beta_s = tl.load(
                    beta + (pair_token + token) * num_heads, mask=pair_token + token < length,
                    other=0.0,
                )[None, :]  # fmt: skip
                decay = tl.exp(G_s - after)
                dP_tile = tl.where(mask, tl.load(dP + pairs), 0.0).to(dtype)
                dM_tile = tl.where(mask, tl.load(dM + pairs) * beta_s, 0.0).to(dtype)
                column_tile += multiply(dP_tile, (q_s * decay).to(dtype), PRECISION)
                column_tile += multiply(dM_tile, (k_s * decay).to(dtype), PRECISION)
    from_before, to_after = tl.exp(G_t - before), tl.exp(after - G_t)
    dq_tile *= from_before
    row_tile *= from_before
    column_tile *= to_after
    position = load_block_positions(positions, first_token, length, BLOCK, PACKED)
    for pair_offset in range(BLOCK):  # pairs within the block
        source = first_token + pair_offset
        k_s = load_token(k, k_token_stride, source, length, channels, CHANNELS)[None, :]
        q_s = load_token(q, q_token_stride, source, length, channels, CHANNELS)[None, :]
        beta_s = tl.load(beta + source * num_heads, mask=source < length, other=0.0)
        G_s = load_key_decays(G, source, key_dim, first_channel, CHANNELS, True)[None, :]
        # This block's tokens t ≥ s = pair_offset
        distance = token - pair_offset
        visible = distance >= 0
        if PACKED:
            visible = visible & (distance <= position)
        pairs = pair_rows + (start + token) * CHUNK + start + pair_offset
        decay = tl.exp(tl.where(visible[:, None], G_t - G_s, float("-inf")))
        dP_column = tl.load(dP + pairs)[:, None]
        dM_column = tl.where(distance > 0, tl.load(dM + pairs), 0.0)[:, None]
        dq_tile += dP_column * decay * k_s
        row_tile += dM_column * decay * k_s
        # This block's tokens s ≤ t = pair_offset
        visible = distance <= 0
        if PACKED:
            position_t = tl.load(positions + source, mask=source < length, other=0)
            visible = visible & (-distance <= position_t)
        pairs = pair_rows + (start + pair_offset) * CHUNK + start + token
        decay = tl.exp(tl.where(visible[:, None], G_s - G_t, float("-inf")))
        dP_row = tl.load(dP + pairs)[:, None]
        dM_row = tl.where(distance < 0, tl.load(dM + pairs), 0.0)[:, None] * beta_s
        column_tile += (dP_row * q_s + dM_row * k_s) * decay
    offsets = (head_row * padded_length + first_token + token[:, None]) * key_dim
    offsets += first_channel + channel[None, :]
    mask = channel[None, :] < channels
    tl.store(dq_pairs + offsets, dq_tile, mask=mask)
    tl.store(dk_rows + offsets, row_tile, mask=mask)
    tl.store(dk_columns + offsets, column_tile, mask=mask)


@triton.jit
def load_block_positions(positions, first_token, length, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Load the positions of BLOCK tokens in their documents, if PACKED."""
    position = tl.arange(0, BLOCK)
    if PACKED:
        token = first_token + position
        position = tl.load(positions + token, mask=token < length, other=0).to(tl.int32)
    return position


@triton.jit
def delta_backward_keys(
    q, k, beta, G, positions, states, state_grads, D, dR, dM, dP, dy, dq_pairs, dk_rows,
    dk_columns, dq, dk, dG, dbeta, length, padded_length, num_chunks, num_heads, heads_per_key,
    key_dim, value_dim, q_row_stride, q_token_stride, k_row_stride, k_token_stride,
    PACKED: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk, dG and the keys' part of dβ, for CHANNELS channels of a chunk's keys.

    dG and dβ are sums over channels [blocks of channels, rows, heads, padded_length]; BY_CHANNEL dG
    is [rows, heads, padded_length, key_dim], and the pairs' gradients come from
    `delta_backward_pairs`.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head, channel_block = tl.program_id(1) % num_heads, tl.program_id(1) // num_heads
    num_rows = tl.num_programs(2)
    first_channel = channel_block * CHANNELS
    dtype: tl.constexpr = q.dtype.element_ty
    first_token, head_row = chunk * CHUNK, row * num_heads + head
    channels = key_dim - first_channel
    token, channel = tl.arange(0, CHUNK), tl.arange(0, CHANNELS)
    padded = head_row * padded_length + first_token
    state_start = (head_row * num_chunks + chunk) * key_dim * value_dim

    dq_state = tl.zeros([CHUNK, CHANNELS], dtype=tl.float32)
    dk_start = tl.zeros([CHUNK, CHANNELS], dtype=tl.float32)
    dk_end = tl.zeros([CHUNK, CHANNELS], dtype=tl.float32)
    decay_grad = tl.zeros([CHANNELS], dtype=tl.float32)
    for first_value in range(0, value_dim, VALUES):
        value = first_value + tl.arange(0, VALUES)[None, :]
        mask = value < value_dim
        offsets, state_mask = state_offsets(value_dim, channels, first_value, CHANNELS, VALUES)
        offsets += state_start + first_channel * value_dim
        state = tl.load(states + offsets, mask=state_mask, other=0.0)
        grad = tl.load(state_grads + offsets, mask=state_mask, other=0.0)
        decay_grad += tl.sum(state.to(tl.float32) * grad.to(tl.float32), axis=1)
        outputs = ((row * length + first_token + token[:, None]) * num_heads + head) * value_dim
        dy_tile = tl.load(
            dy + outputs + value, mask=mask & (first_token + token[:, None] < length), other=0.0
        )
        dR_tile = tl.load(dR + (padded + token[:, None]) * value_dim + value, mask=mask, other=0.0)
        D_tile = tl.load(D + (padded + token[:, None]) * value_dim + value, mask=mask, other=0.0)
        state, grad = tl.trans(state), tl.trans(grad)
        dq_state += multiply(dy_tile, state, PRECISION)
        dk_start -= multiply(dR_tile, state, PRECISION)
        dk_end += multiply(D_tile, grad, PRECISION)

    decays = key_dim if BY_CHANNEL else 1
    G += head_row * padded_length * decays
    G_t = load_decays(G, first_token, key_dim, first_channel, CHUNK, CHANNELS, BY_CHANNEL)
    G_end = load_key_decays(
        G, first_token + CHUNK - 1, key_dim, first_channel, CHANNELS, BY_CHANNEL
    )
    start_mask, end_mask, unbroken = document_masks(
        positions + row * length, first_token, length, CHUNK, PACKED
    )
    from_start = tl.where(start_mask[:, None], tl.exp(G_t), 0.0)
    to_end = tl.where(end_mask[:, None], tl.exp(G_end[None, :] - G_t), 0.0)
    q_tile = load_tile(
        q + row * q_row_stride + head // heads_per_key * key_dim + first_channel, q_token_stride,
        first_token, length, channels, CHUNK, CHANNELS,
    )  # fmt: skip
    k_tile = load_tile(
        k + row * k_row_stride + head // heads_per_key * key_dim + first_channel, k_token_stride,
        first_token, length, channels, CHUNK, CHANNELS,
    )  # fmt: skip
    token_mask = first_token + token < length
    beta_t = tl.load(
        beta + (row * length + first_token + token) * num_heads + head, mask=token_mask, other=0.0
    )[:, None]
    dq_tile = dq_state * from_start
    later = dk_start * from_start  # of k with e^{+G}, without its β
    ends = dk_end * to_end
    earlier = ends  # of k with e^{−G}
    if BY_CHANNEL:
        offsets = (padded + token[:, None]) * key_dim + first_channel + channel[None, :]
        mask = channel[None, :] < channels
        dq_tile += tl.load(dq_pairs + offsets, mask=mask, other=0.0)
        later += tl.load(dk_rows + offsets, mask=mask, other=0.0)
        earlier += tl.load(dk_columns + offsets, mask=mask, other=0.0)
    else:
        visible, distance = visible_pairs(
            positions + row * length, first_token, length, CHUNK, PACKED
        )
        flat = tl.reshape(G_t, [CHUNK])
        decay = tl.exp(tl.where(visible, flat[:, None] - flat[None, :], float("-inf")))
        queries = load_square(dP + padded * CHUNK, CHUNK) * decay
        keys = tl.where(distance > 0, load_square(dM + padded * CHUNK, CHUNK) * decay, 0.0)
        dq_tile += multiply(queries.to(dtype), k_tile, PRECISION)
        later += multiply(keys.to(dtype), k_tile, PRECISION)
        earlier += multiply(tl.trans(queries.to(dtype)), q_tile, PRECISION)
        earlier += multiply(tl.trans((keys * beta_t).to(dtype)), k_tile, PRECISION)
    dk_tile = later * beta_t + earlier
    outputs = ((row * length + first_token + token[:, None]) * num_heads + head) * key_dim
    outputs += first_channel + channel[None, :]
    mask = token_mask[:, None] & (channel[None, :] < channels)
    tl.store(dq + outputs, dq_tile.to(dq.dtype.element_ty), mask=mask)
    tl.store(dk + outputs, dk_tile.to(dk.dtype.element_ty), mask=mask)
    partial = (channel_block * num_rows * num_heads + head_row) * padded_length + first_token
    tl.store(dbeta + partial + token, tl.sum(later * k_tile, axis=1))
    G_grad = dq_tile * q_tile + (later * beta_t - earlier) * k_tile
    last_grad = tl.sum(ends * k_tile, axis=0) + decay_grad * tl.exp(G_end) * unbroken
    last = token == CHUNK - 1
    if BY_CHANNEL:
        G_grad += tl.where(last[:, None], last_grad[None, :], 0.0)
        offsets = (padded + token[:, None]) * key_dim + first_channel + channel[None, :]
        tl.store(dG + offsets, G_grad, mask=channel[None, :] < channels)
    else:
        sums = tl.sum(G_grad, axis=1) + tl.where(last, tl.sum(last_grad, axis=0), 0.0)
        tl.store(dG + partial + token, sums)
