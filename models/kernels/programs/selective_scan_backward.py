"""Triton programs of selective_scan.py's backward pass; see programs/selective_scan.py."""

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
    grad, dt, z, bias, A, C, positions, adjoints, length, chunks, channels, heads, size, blocks,
    z_row, z_token,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Write each chunk's contribution to the gradients of the states at its start."""
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, some = program_channels(channels, blocks, CHANNELS)
    width = channels * heads
    first = chunk * CHUNK
    tokens = tl.minimum(length - first, CHUNK)
    origin = row * length + first
    grad += origin * width
    dt += origin * width
    z += row * z_row + first.to(tl.int64) * z_token
    C += (origin * heads + head) * size
    positions += row * length
    real = (tl.arange(0, MODES)[:, None] >= 0) & some[None, :]
    decay = tl.load(A + state_offsets(0, 0, 1, width, channel, MODES), mask=real, other=0.0)
    offset = tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)
    adjoint = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        steps = ()
        pulls = ()
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            at = token * width + channel
            here = some & (at < tokens * width)
            step, _ = softplus(dt, at, here, offset)
            steps = steps + (step,)
            above = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
            gate = tl.load(z + token * z_token + channel, mask=here, other=0.0).to(tl.float32)
            pulls = pulls + (above * gate * tl.sigmoid(gate),)
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            outof = load_token_modes(C, token, tokens, heads * size, size, MODES)
            shut = 0.0
            if PACKED:
                shut = document_start_log_decay(positions, first + token, length)
            keep = tl.exp2(steps[k][None, :] * decay + shut)
            adjoint = keep * (adjoint + outof[:, None] * pulls[k][None, :])
    tl.store(
        adjoints + state_offsets(row, chunk, chunks, width, channel, MODES), adjoint, mask=real
    )


@triton.jit
def selective_scan_backward(
    grad, x, dt, z, bias, A, B, C, D, positions, states, adjoints, shares,
    grad_x, grad_dt, grad_z, grad_A, grad_D, grad_bias, grad_B, grad_C,
    length, chunks, channels, heads, size, blocks, z_row, z_token,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Scan the chunk forward for the terms that need the states, and back for those that need the
    states' gradients.

    The gradient of Δ through the decay λ is Σ_n A_n·q_n, where q_t = λ_t·S_{t−1}·(gradient of S_t):
    a product of a forward and a backward quantity. It obeys q_t = q_{t+1} + (term of S_t in y) −
    (term of t in S_t), each times its gradient. The forward scan computes the first term and keeps
    it in `shares`, fp32 [rows, length, width], for the way back. The gradient of A needs no such
    term: P = ∂S/∂A is scanned beside S.
    """
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, some = program_channels(channels, blocks, CHANNELS)
    width = channels * heads
    first = chunk * CHUNK
    tokens = tl.minimum(length - first, CHUNK)
    origin = row * length + first
    grad += origin * width
    x += origin * width
    dt += origin * width
    z += row * z_row + first.to(tl.int64) * z_token
    shares += origin * width
    grad_x += origin * width
    grad_dt += origin * width
    grad_z += origin * width
    B += (origin * heads + head) * size
    C += (origin * heads + head) * size
    block = (tl.program_id(1) % blocks).to(tl.int64)  # summed over afterwards
    partial = ((block * tl.num_programs(2) * length + origin) * heads + head) * size
    grad_B += partial
    grad_C += partial
    positions += row * length
    of_chunk = (row * chunks + chunk) * MODES * width
    states += of_chunk
    adjoints += of_chunk
    grad_A += of_chunk
    mode = tl.arange(0, MODES)
    real = (mode[:, None] >= 0) & some[None, :]
    own = state_offsets(
        0, 0, 1, width, channel, MODES
    )  # 32 bits: they stay in registers to the end
    decay = tl.load(A + own, mask=real, other=0.0)
    offset = tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)
    through = tl.load(D + channel, mask=some, other=0.0).to(tl.float32)

    state = tl.load(states + own, mask=real, other=0.0)
    slope = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    of_A = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    of_D = tl.zeros([CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        steps = ()
        inputs = ()
        gates = ()
        above = ()
        for k in tl.static_range(UNROLL):
            at = (start + k) * width + channel
            here = some & (at < tokens * width)
            step, _ = softplus(dt, at, here, offset)
            steps = steps + (step,)
            inputs = inputs + (tl.load(x + at, mask=here, other=0.0),)
            gate = tl.load(z + (start + k) * z_token + channel, mask=here, other=0.0)
            gates = gates + (gate,)
            above = above + (tl.load(grad + at, mask=here, other=0.0),)
        of_gates = ()
        given = ()
        for k in tl.static_range(UNROLL):
            into = load_token_modes(B, start + k, tokens, heads * size, size, MODES)
            outof = load_token_modes(C, start + k, tokens, heads * size, size, MODES)
            shut = 0.0
            if PACKED:
                shut = document_start_log_decay(positions, first + start + k, length)
            value = inputs[k].to(tl.float32)
            keep = tl.exp2(steps[k][None, :] * decay + shut)
            slope = keep * (slope + steps[k][None, :] * state)
            state = keep * state + (steps[k] * value)[None, :] * into[:, None]
            gives = outof[:, None] * state
            y = tl.sum(gives, axis=0) + through * value
            gate = gates[k].to(tl.float32)
            open_ = tl.sigmoid(gate)
            g = above[k].to(tl.float32)
            of_gates = of_gates + (g * y * open_ * (1.0 + gate * (1.0 - open_)),)
            pull = g * gate * open_
            given = given + (pull * tl.sum(gives * decay, axis=0),)
            of_A += (outof[:, None] * slope) * pull[None, :]
            of_D += pull * value
            place = (start + k) * (heads * size) + mode
            inside = (mode < size) & (place < tokens * heads * size)
            tl.store(grad_C + place, tl.sum(state * pull[None, :], axis=1), mask=inside)
        for k in tl.static_range(UNROLL):
            at = (start + k) * width + channel
            here = some & (at < tokens * width)
            tl.store(grad_z + at, of_gates[k].to(grad_z.dtype.element_ty), mask=here)
            tl.store(shares + at, given[k], mask=here)

    adjoint = tl.load(adjoints + own, mask=real, other=0.0)  # after the chunk, times its λ
    tl.store(grad_A + own, of_A + adjoint * slope, mask=real)
    product = tl.sum(adjoint * state * decay, axis=0)
    of_bias = tl.zeros([CHANNELS], dtype=tl.float32)
    tl.debug_barrier()  # other threads may read what this thread wrote to `shares`
    for start in range(0, CHUNK, UNROLL):
        steps = ()
        slopes = ()
        inputs = ()
        pulls = ()
        given = ()
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            at = token * width + channel
            here = some & (at < tokens * width)
            step, steep = softplus(dt, at, here, offset)
            steps = steps + (step,)
            slopes = slopes + (tl.where(here, steep, 0.0),)
            inputs = inputs + (tl.load(x + at, mask=here, other=0.0),)
            g = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
            gate = tl.load(z + token * z_token + channel, mask=here, other=0.0).to(tl.float32)
            pulls = pulls + (g * gate * tl.sigmoid(gate),)
            given = given + (tl.load(shares + at, mask=here, other=0.0),)
        of_inputs = ()
        of_steps = ()
        for k in tl.static_range(UNROLL):
            token = CHUNK - 1 - start - k
            into = load_token_modes(B, token, tokens, heads * size, size, MODES)
            outof = load_token_modes(C, token, tokens, heads * size, size, MODES)
            shut = 0.0
            if PACKED:
                shut = document_start_log_decay(positions, first + token, length)
            value = inputs[k].to(tl.float32)
            adjoint += outof[:, None] * pulls[k][None, :]
            takes = into[:, None] * adjoint
            taken = tl.sum(takes, axis=0)
            of_inputs = of_inputs + (taken * steps[k] + through * pulls[k],)
            product += given[k] - steps[k] * value * tl.sum(takes * decay, axis=0)
            if PACKED:
                product = tl.where(shut == 0.0, product, 0.0)
            of_step = (taken * value + LN2 * product) * slopes[k]
            of_steps = of_steps + (of_step,)
            of_bias += of_step
            place = token * (heads * size) + mode
            inside = (mode < size) & (place < tokens * heads * size)
            summed = tl.sum(adjoint * (steps[k] * value)[None, :], axis=1)
            tl.store(grad_B + place, summed, mask=inside)
            adjoint *= tl.exp2(steps[k][None, :] * decay + shut)
        for k in tl.static_range(UNROLL):
            at = (CHUNK - 1 - start - k) * width + channel
            here = some & (at < tokens * width)
            tl.store(grad_x + at, of_inputs[k].to(grad_x.dtype.element_ty), mask=here)
            tl.store(grad_dt + at, of_steps[k].to(grad_dt.dtype.element_ty), mask=here)
    sums = (row * chunks + chunk) * width + channel
    tl.store(grad_D + sums, of_D, mask=some)
    tl.store(grad_bias + sums, of_bias, mask=some)
