"""Triton programs for selective_scan.py's backward pass; see programs/selective_scan.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .selective import (
    document_start_log_decay,
    load_token_modes,
    program_channels,
    softplus,
    state_offsets,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def selective_scan_backward_chunk_states(
    dy, dt, z, dt_bias, A, C, positions, grad_states, length, num_chunks, num_channels, num_heads,
    state_size, num_blocks, z_row_stride, z_token_stride,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Each chunk's contribution to dS, the state gradient before its start k.

    contribution = Σ_t exp(Σ_{k≤r≤t} Δ_r·A)·C_t·g_t,  g_t = dy_t·silu(z_t) (`scan_grads`).
    """
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, channel_mask = program_channels(num_channels, num_blocks, CHANNELS)
    width = num_channels * num_heads
    first_token = chunk * CHUNK
    num_tokens = tl.minimum(length - first_token, CHUNK)
    row_token = row * length + first_token
    dy += row_token * width
    dt += row_token * width
    z += row * z_row_stride + first_token.to(tl.int64) * z_token_stride
    C += (row_token * num_heads + head) * state_size
    positions += row * length
    state_mask = (tl.arange(0, MODES)[:, None] >= 0) & channel_mask[None, :]
    rates = tl.load(A + state_offsets(0, 0, 1, width, channel, MODES), mask=state_mask, other=0.0)
    bias = tl.load(dt_bias + channel, mask=channel_mask, other=0.0).to(tl.float32)
    grad_state = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        deltas = ()
        scan_grads = ()
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            offsets = token * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            delta, _ = softplus(dt, offsets, mask, bias)
            deltas = deltas + (delta,)
            dy_t = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(z + token * z_token_stride + channel, mask=mask, other=0.0).to(
                tl.float32
            )
            scan_grads = scan_grads + (dy_t * gate * tl.sigmoid(gate),)
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            C_t = load_token_modes(C, token, num_tokens, num_heads * state_size, state_size, MODES)
            log_reset = 0.0
            if PACKED:
                log_reset = document_start_log_decay(positions, first_token + token, length)
            decay = tl.exp2(deltas[k][None, :] * rates + log_reset)
            grad_state = decay * (grad_state + C_t[:, None] * scan_grads[k][None, :])
    tl.store(
        grad_states + state_offsets(row, chunk, num_chunks, width, channel, MODES),
        grad_state,
        mask=state_mask,
    )


@triton.jit
def selective_scan_backward(
    dy, x, dt, z, dt_bias, A, B, C, D, positions, states, grad_states, state_terms, grad_x, grad_dt,
    grad_z, grad_A, grad_D, grad_bias, grad_B, grad_C, length, num_chunks, num_channels, num_heads,
    state_size, num_blocks, z_row_stride, z_token_stride,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Scan the chunk forward for the terms that need S, and back for those that need its gradient.

    With g_t = dy_t·silu(z_t), h_t = S_t·C_t + D·x_t and λ_t = exp(Δ_t·A):

        dS_t = λ_{t+1}·dS_{t+1} + C_t·g_t,  dB_t = Σ Δ_t·x_t·dS_t,  dC_t = Σ S_t·g_t
        dx_t = Δ_t·(B_t·dS_t) + D·g_t,  dD = Σ_t g_t·x_t,  dz_t = dy_t·h_t·silu'(z_t)
        dA = Σ_t (C_t·P_t)·g_t,  P_t = ∂S_t/∂A = λ_t·(P_{t−1} + Δ_t·S_{t−1})
        dΔ_t = x_t·(B_t·dS_t) + Σ_n A_n·q_tn,  q_t = λ_t·S_{t−1}·dS_t

    q is a product of a forward and a backward quantity, with q_t = q_{t+1} + (C_t·S_t)·g_t −
    Δ_t·x_t·B_t·dS_t. The forward scan keeps Σ_n A_n·(C_t·S_t)·g_t in `state_terms`, fp32
    [rows, length, width], for the way back, where `Aq` is Σ_n A_n·q_tn. A times log₂e is loaded, so
    sums over A are multiplied by ln 2.
    """
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, channel_mask = program_channels(num_channels, num_blocks, CHANNELS)
    width = num_channels * num_heads
    first_token = chunk * CHUNK
    num_tokens = tl.minimum(length - first_token, CHUNK)
    row_token = row * length + first_token
    dy += row_token * width
    x += row_token * width
    dt += row_token * width
    z += row * z_row_stride + first_token.to(tl.int64) * z_token_stride
    state_terms += row_token * width
    grad_x += row_token * width
    grad_dt += row_token * width
    grad_z += row_token * width
    B += (row_token * num_heads + head) * state_size
    C += (row_token * num_heads + head) * state_size
    block = (tl.program_id(1) % num_blocks).to(tl.int64)  # summed over afterwards
    partial_offset = (
        (block * tl.num_programs(2) * length + row_token) * num_heads + head
    ) * state_size
    grad_B += partial_offset
    grad_C += partial_offset
    positions += row * length
    chunk_offset = (row * num_chunks + chunk) * MODES * width
    states += chunk_offset
    grad_states += chunk_offset
    grad_A += chunk_offset
    mode = tl.arange(0, MODES)
    state_mask = (mode[:, None] >= 0) & channel_mask[None, :]
    chunk_offsets = state_offsets(
        0, 0, 1, width, channel, MODES
    )  # 32 bits: they stay in registers to the end
    rates = tl.load(A + chunk_offsets, mask=state_mask, other=0.0)
    bias = tl.load(dt_bias + channel, mask=channel_mask, other=0.0).to(tl.float32)
    skip = tl.load(D + channel, mask=channel_mask, other=0.0).to(tl.float32)

    state = tl.load(states + chunk_offsets, mask=state_mask, other=0.0)
    P = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    sum_A = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    sum_D = tl.zeros([CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        deltas = ()
        x_values = ()
        gates = ()
        dy_values = ()
        for k in tl.static_range(UNROLL):
            offsets = (start + k) * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            delta, _ = softplus(dt, offsets, mask, bias)
            deltas = deltas + (delta,)
            x_values = x_values + (tl.load(x + offsets, mask=mask, other=0.0),)
            gate = tl.load(z + (start + k) * z_token_stride + channel, mask=mask, other=0.0)
            gates = gates + (gate,)
            dy_values = dy_values + (tl.load(dy + offsets, mask=mask, other=0.0),)
        z_grads = ()
        terms = ()
        for k in tl.static_range(UNROLL):
            B_t = load_token_modes(
                B, start + k, num_tokens, num_heads * state_size, state_size, MODES
            )
            C_t = load_token_modes(
                C, start + k, num_tokens, num_heads * state_size, state_size, MODES
            )
            log_reset = 0.0
            if PACKED:
                log_reset = document_start_log_decay(positions, first_token + start + k, length)
            x_t = x_values[k].to(tl.float32)
            decay = tl.exp2(deltas[k][None, :] * rates + log_reset)
            P = decay * (P + deltas[k][None, :] * state)
            state = decay * state + (deltas[k] * x_t)[None, :] * B_t[:, None]
            y_terms = C_t[:, None] * state
            y = tl.sum(y_terms, axis=0) + skip * x_t
            gate = gates[k].to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            dy_t = dy_values[k].to(tl.float32)
            z_grads = z_grads + (dy_t * y * sigmoid * (1.0 + gate * (1.0 - sigmoid)),)
            scan_grad = dy_t * gate * sigmoid
            terms = terms + (scan_grad * tl.sum(y_terms * rates, axis=0),)
            sum_A += (C_t[:, None] * P) * scan_grad[None, :]
            sum_D += scan_grad * x_t
            mode_offsets = (start + k) * (num_heads * state_size) + mode
            mode_mask = (mode < state_size) & (mode_offsets < num_tokens * num_heads * state_size)
            tl.store(
                grad_C + mode_offsets, tl.sum(state * scan_grad[None, :], axis=1), mask=mode_mask
            )
        for k in tl.static_range(UNROLL):
            offsets = (start + k) * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            tl.store(grad_z + offsets, z_grads[k].to(grad_z.dtype.element_ty), mask=mask)
            tl.store(state_terms + offsets, terms[k], mask=mask)

    grad_state = tl.load(
        grad_states + chunk_offsets, mask=state_mask, other=0.0
    )  # after the chunk, times its λ
    tl.store(grad_A + chunk_offsets, sum_A + grad_state * P, mask=state_mask)
    Aq = tl.sum(grad_state * state * rates, axis=0)
    sum_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    tl.debug_barrier()  # other threads may read what this thread wrote to `state_terms`
    for start in range(0, CHUNK, UNROLL):
        deltas = ()
        slopes = ()
        x_values = ()
        scan_grads = ()
        terms = ()
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            offsets = token * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            delta, slope = softplus(dt, offsets, mask, bias)
            deltas = deltas + (delta,)
            slopes = slopes + (tl.where(mask, slope, 0.0),)
            x_values = x_values + (tl.load(x + offsets, mask=mask, other=0.0),)
            dy_t = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(z + token * z_token_stride + channel, mask=mask, other=0.0).to(
                tl.float32
            )
            scan_grads = scan_grads + (dy_t * gate * tl.sigmoid(gate),)
            terms = terms + (tl.load(state_terms + offsets, mask=mask, other=0.0),)
        x_grads = ()
        dt_grads = ()
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            B_t = load_token_modes(B, token, num_tokens, num_heads * state_size, state_size, MODES)
            C_t = load_token_modes(C, token, num_tokens, num_heads * state_size, state_size, MODES)
            log_reset = 0.0
            if PACKED:
                log_reset = document_start_log_decay(positions, first_token + token, length)
            x_t = x_values[k].to(tl.float32)
            grad_state += C_t[:, None] * scan_grads[k][None, :]
            input_terms = B_t[:, None] * grad_state
            input_grad = tl.sum(input_terms, axis=0)
            x_grads = x_grads + (input_grad * deltas[k] + skip * scan_grads[k],)
            Aq += terms[k] - deltas[k] * x_t * tl.sum(input_terms * rates, axis=0)
            if PACKED:
                Aq = tl.where(log_reset == 0.0, Aq, 0.0)
            dt_grad = (input_grad * x_t + LN2 * Aq) * slopes[k]
            dt_grads = dt_grads + (dt_grad,)
            sum_bias += dt_grad
            mode_offsets = token * (num_heads * state_size) + mode
            mode_mask = (mode < state_size) & (mode_offsets < num_tokens * num_heads * state_size)
            B_grad = tl.sum(grad_state * (deltas[k] * x_t)[None, :], axis=1)
            tl.store(grad_B + mode_offsets, B_grad, mask=mode_mask)
            grad_state *= tl.exp2(deltas[k][None, :] * rates + log_reset)
        for k in tl.static_range(UNROLL):
            offsets = (CHUNK - 1 - start - k) * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            tl.store(grad_x + offsets, x_grads[k].to(grad_x.dtype.element_ty), mask=mask)
            tl.store(grad_dt + offsets, dt_grads[k].to(grad_dt.dtype.element_ty), mask=mask)
    sum_offsets = (row * num_chunks + chunk) * width + channel
    tl.store(grad_D + sum_offsets, sum_D, mask=channel_mask)
    tl.store(grad_bias + sum_offsets, sum_bias, mask=channel_mask)
