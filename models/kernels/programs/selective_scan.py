"""Triton programs for selective_scan.py.

    S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t·B_t,  y_t = (S_t·C_t + D·x_t)·silu(z_t)

A program is one warp. It holds a head's CHANNELS channels with their states S [MODES, CHANNELS] in
registers, and scans a token chunk, UNROLL at a time: loads precede the first use, and stores follow
the last. Sums over channels stay within the warp.

`A` holds A·log₂e, [MODES, width]. At a document's start, −∞ is added to the decay's logarithm
(`log_reset`). Tokens outside the row have Δ = 0 and change nothing.
"""

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


@triton.jit
def selective_scan_chunk_states(
    x, dt, dt_bias, A, B, positions, contributions, delta_sums, length, num_chunks, num_channels,
    num_heads, state_size, num_blocks,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Each chunk's contribution to the states at its end e, from zeros, and Σ Δ over the chunk.

    contribution = Σ_t exp(Σ_{t<r≤e} Δ_r·A)·Δ_t·x_t·B_t.  The sum of Δ is ∞ if a document begins in
    the chunk: then no state passes through it.
    """
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, channel_mask = program_channels(num_channels, num_blocks, CHANNELS)
    width = num_channels * num_heads
    first_token = chunk * CHUNK
    num_tokens = tl.minimum(length - first_token, CHUNK)
    row_token = row * length + first_token
    x += row_token * width
    dt += row_token * width
    B += (row_token * num_heads + head) * state_size
    positions += row * length
    state_mask = (tl.arange(0, MODES)[:, None] >= 0) & channel_mask[None, :]
    rates = tl.load(A + state_offsets(0, 0, 1, width, channel, MODES), mask=state_mask, other=0.0)
    bias = tl.load(dt_bias + channel, mask=channel_mask, other=0.0).to(tl.float32)
    state = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    delta_sum = tl.zeros([CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        deltas = ()
        x_values = ()
        for k in tl.static_range(UNROLL):
            offsets = (start + k) * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            delta, _ = softplus(dt, offsets, mask, bias)
            deltas = deltas + (delta,)
            x_values = x_values + (tl.load(x + offsets, mask=mask, other=0.0),)
        for k in tl.static_range(UNROLL):
            B_t = load_token_modes(
                B, start + k, num_tokens, num_heads * state_size, state_size, MODES
            )
            log_reset = 0.0
            if PACKED:
                log_reset = document_start_log_decay(positions, first_token + start + k, length)
            decay = tl.exp2(deltas[k][None, :] * rates + log_reset)
            input = deltas[k] * x_values[k].to(tl.float32)
            state = decay * state + input[None, :] * B_t[:, None]
            delta_sum += deltas[k] - log_reset
    tl.store(
        contributions + state_offsets(row, chunk, num_chunks, width, channel, MODES),
        state,
        mask=state_mask,
    )
    tl.store(
        delta_sums + (row * num_chunks + chunk) * width + channel, delta_sum, mask=channel_mask
    )


@triton.jit
def selective_scan_scan_states(
    states, delta_sums, A, initial, final, width, num_chunks, state_numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Scan over chunks: S ← exp(A·Σ Δ)·S + contribution, from `initial` (START) or zeros.

    `final` receives the last S. WRITE replaces each contribution in `states` by S at the chunk's
    start. BACKWARD scans the state gradients, from the last chunk.
    """
    row = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < state_numbers  # MODES · width
    rates = tl.load(A + offsets, mask=mask, other=0.0)
    states += row * num_chunks * state_numbers
    delta_sums += row * num_chunks * width
    end_offset = (row * 0 + num_chunks) * state_numbers  # in 64 bits
    state = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        state += tl.load(initial + row * state_numbers + offsets, mask=mask, other=0.0)
    for group in range(tl.cdiv(num_chunks, UNROLL)):
        contributions = ()
        decays = ()
        for k in tl.static_range(UNROLL):
            chunk = row * 0 + group * UNROLL + k
            if BACKWARD:
                chunk = num_chunks - 1 - chunk
            chunk_offsets = chunk * state_numbers + offsets
            chunk_mask = mask & (chunk_offsets >= 0) & (chunk_offsets < end_offset)
            contribution = tl.load(states + chunk_offsets, mask=chunk_mask, other=0.0)
            delta_sum = tl.load(
                delta_sums + chunk * width + offsets % width, mask=chunk_mask, other=0.0
            )
            has_reset = delta_sum == float("inf")
            decay = tl.exp2(tl.where(has_reset, 0.0, delta_sum) * rates)
            contributions = contributions + (contribution,)
            decays = decays + (tl.where(has_reset, 0.0, decay),)
        for k in tl.static_range(UNROLL):
            chunk = row * 0 + group * UNROLL + k
            if BACKWARD:
                chunk = num_chunks - 1 - chunk
            chunk_offsets = chunk * state_numbers + offsets
            chunk_mask = mask & (chunk_offsets >= 0) & (chunk_offsets < end_offset)
            if WRITE:
                tl.store(states + chunk_offsets, state, mask=chunk_mask)
            state = state * decays[k] + contributions[k]
    tl.store(final + row * state_numbers + offsets, state, mask=mask)


@triton.jit
def selective_scan_forward(
    x, dt, z, dt_bias, A, B, C, D, positions, states, out, length, num_chunks, num_channels,
    num_heads, state_size, num_blocks, z_row_stride, z_token_stride,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """y_t = (S_t·C_t + D·x_t)·silu(z_t), with S_t = exp(Δ_t·A)·S_{t−1} + Δ_t·x_t·B_t.

    `states` holds S at each chunk's start.
    """
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, channel_mask = program_channels(num_channels, num_blocks, CHANNELS)
    width = num_channels * num_heads
    first_token = chunk * CHUNK
    num_tokens = tl.minimum(length - first_token, CHUNK)
    row_token = row * length + first_token
    x += row_token * width
    dt += row_token * width
    z += row * z_row_stride + first_token.to(tl.int64) * z_token_stride
    out += row_token * width
    B += (row_token * num_heads + head) * state_size
    C += (row_token * num_heads + head) * state_size
    positions += row * length
    state_mask = (tl.arange(0, MODES)[:, None] >= 0) & channel_mask[None, :]
    chunk_offsets = state_offsets(row, chunk, num_chunks, width, channel, MODES)
    rates = tl.load(A + state_offsets(0, 0, 1, width, channel, MODES), mask=state_mask, other=0.0)
    state = tl.load(states + chunk_offsets, mask=state_mask, other=0.0)
    bias = tl.load(dt_bias + channel, mask=channel_mask, other=0.0).to(tl.float32)
    skip = tl.load(D + channel, mask=channel_mask, other=0.0).to(tl.float32)
    for start in range(0, CHUNK, UNROLL):
        deltas = ()
        x_values = ()
        gates = ()
        for k in tl.static_range(UNROLL):
            offsets = (start + k) * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            delta, _ = softplus(dt, offsets, mask, bias)
            deltas = deltas + (delta,)
            x_values = x_values + (tl.load(x + offsets, mask=mask, other=0.0),)
            gate = tl.load(z + (start + k) * z_token_stride + channel, mask=mask, other=0.0)
            gates = gates + (gate,)
        outputs = ()
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
            state = decay * state + (deltas[k] * x_t)[None, :] * B_t[:, None]
            y = tl.sum(C_t[:, None] * state, axis=0) + skip * x_t
            gate = gates[k].to(tl.float32)
            outputs = outputs + (y * gate * tl.sigmoid(gate),)
        for k in tl.static_range(UNROLL):
            offsets = (start + k) * width + channel
            mask = channel_mask & (offsets < num_tokens * width)
            tl.store(out + offsets, outputs[k].to(out.dtype.element_ty), mask=mask)
