"""Next Triton programs for ssd.py, which no device has confirmed: `kernels.ssd: next` runs them.

ssd_outputs walks along a span with the state in registers, one chunk after the other: 255 registers
a thread, so one program a multiprocessor, which waits for each load and each product. Here a
program writes one chunk. In place of the state it has the span's earlier chunks: as many products,
none of which waits for a state, in half the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ssd import chunk_decays, decay_matrix, dot_add, load_positions, load_tile, state_ptrs


@triton.jit
def ssd_outputs_by_chunk(
    x, C, B, delta, dA_cumsum, D, positions, states, out, length, padded_length, num_spans,
    num_heads, heads_per_group, head_dim, state_size, x_row_stride, x_token_stride, B_row_stride,
    B_token_stride, out_row_stride, out_token_stride,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y_t of one chunk, as in ssd_outputs: with S the state before the span, and chunks c before
    t's,

        y_t = decay_from_start_t·Y_t + Σ_{s≤t} (C_t·B_s)·L_ts·Δ_s·x_s + D·x_t
        Y ← S·C_t;  for each c: Y ← decay_c·Y + Σ_{s in c} (C_t·B_s)·decay_to_end_s·Δ_s·x_s

    BACKWARD: dx_s = Δ_s·(decay_to_end_s·Y_s + Σ_{t≥s} (C_t·B_s)·L_ts·dy_t) + D·dy_s, and the chunks
    after s's, the last one first, have the weights decay_from_start_t; x, C, B and states then hold
    dy, B, C and the gradients of the states.
    """
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    x += row * x_row_stride + head * head_dim
    C += row * B_row_stride + head // heads_per_group * state_size
    B += row * B_row_stride + head // heads_per_group * state_size
    out += row * out_row_stride + head * head_dim
    delta += (row * num_heads + head) * padded_length
    dA_cumsum += (row * num_heads + head) * padded_length
    positions += row * length
    span = chunk // CHUNKS
    start_chunk = span * CHUNKS
    end_chunk = tl.minimum(start_chunk + CHUNKS, tl.cdiv(length, CHUNK))
    first_token = chunk * CHUNK
    C_tile = load_tile(C, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE)
    span_offset = (row * num_spans + span) * num_heads + head
    ptrs, state_mask = state_ptrs(
        states + span_offset * head_dim * state_size, head_dim, state_size, HEAD_DIM, STATE_SIZE
    )
    y = tl.dot(
        C_tile, tl.trans(tl.load(ptrs, mask=state_mask, other=0.0)), input_precision=PRECISION,
        out_dtype=tl.float32,
    )  # fmt: skip
    for index in range(end_chunk - 1 - chunk if BACKWARD else chunk - start_chunk):
        far_token = (end_chunk - 1 - index if BACKWARD else start_chunk + index) * CHUNK
        far_delta, _, far_to_end, far_from_start, far_decay = chunk_decays(
            delta, dA_cumsum, positions, far_token, length, CHUNK, PACKED
        )
        B_tile = load_tile(B, B_token_stride, far_token, length, state_size, CHUNK, STATE_SIZE)
        x_tile = load_tile(x, x_token_stride, far_token, length, head_dim, CHUNK, HEAD_DIM)
        scores = tl.dot(
            C_tile, tl.trans(B_tile), input_precision=PRECISION, out_dtype=tl.float32,
        )  # fmt: skip
        scores *= (far_from_start if BACKWARD else far_delta * far_to_end)[None, :]
        y = dot_add(y * far_decay, scores.to(dtype), x_tile, PRECISION)
    delta_t, cumsum_t, decay_to_end, decay_from_start, _ = chunk_decays(
        delta, dA_cumsum, positions, first_token, length, CHUNK, PACKED
    )
    y *= (decay_to_end if BACKWARD else decay_from_start)[:, None]
    B_tile = load_tile(B, B_token_stride, first_token, length, state_size, CHUNK, STATE_SIZE)
    x_tile = load_tile(x, x_token_stride, first_token, length, head_dim, CHUNK, HEAD_DIM)
    scores = tl.dot(
        C_tile, tl.trans(B_tile), input_precision=PRECISION, out_dtype=tl.float32,
    )  # fmt: skip
    position = load_positions(positions, first_token, length, CHUNK, PACKED)
    scores *= decay_matrix(cumsum_t, position, CHUNK, PACKED, BACKWARD)
    if not BACKWARD:
        scores *= delta_t[None, :]
    y = dot_add(y, scores.to(dtype), x_tile, PRECISION)
    if BACKWARD:
        y *= delta_t[:, None]
    y += tl.load(D + head).to(tl.float32) * x_tile.to(tl.float32)
    token = tl.arange(0, CHUNK)[:, None]
    channel = tl.arange(0, HEAD_DIM)[None, :]
    out_ptrs = (
        out + first_token.to(tl.int64) * out_token_stride + token * out_token_stride + channel
    )
    mask = (first_token + token < length) & (channel < head_dim)
    tl.store(out_ptrs, y.to(out.dtype.element_ty), mask=mask)
