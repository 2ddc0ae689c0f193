"""Next Triton programs for modal.py, which no device has confirmed: `kernels.modal: next`.

    S_t = λ·S_{t−1} + w_t,  y_t = q_t·(direct·w_t + Σ_n weight_n·S_{n,t−1})
    w = k ⊙ v,  λ = e^{−rate},  weight = R·λ,  direct = Σ_n R_n + skip

A thread holds a channel's MODES states in registers and walks along a row's chunk, UNROLL tokens at
a time: fp32 multiply-adds alone, without products on the matrix units, which cost barriers. Where a
document begins, the state is zero; the tokens of such a group are walked one by one.

The gradients run from the end: G_t = p_t + λ·G_{t+1},  p = q ⊙ dy, without residues, so that one
multiply-add updates them. The gradient of S_t that comes from later tokens is weight·G_{t+1}.

States and filters are [blocks, MODES, CHANNELS]: a mode's distance is a constant, which needs no
registers for addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import program_chunk
from .walk import add_products, zero_sums


@triton.jit
def load_by_mode(x, MODES: tl.constexpr, CHANNELS: tl.constexpr):
    """Load x [MODES, CHANNELS]: a tuple of channel vectors."""
    modes = ()
    for mode in tl.static_range(MODES):
        modes = modes + (tl.load(x + mode * CHANNELS + tl.arange(0, CHANNELS)),)
    return modes


@triton.jit
def store_by_mode(x, values, MODES: tl.constexpr, CHANNELS: tl.constexpr):
    for mode in tl.static_range(MODES):
        tl.store(x + mode * CHANNELS + tl.arange(0, CHANNELS), values[mode])


@triton.jit
def load_group(x, token, channel, channel_mask, token_stride, UNROLL: tl.constexpr):
    """Load UNROLL tokens, all before the first use: a tuple. Offsets have 32 bits."""
    tokens = ()
    for step in tl.static_range(UNROLL):
        offsets = (token + step) * token_stride + channel
        tokens = tokens + (tl.load(x + offsets, mask=channel_mask),)
    return tokens


@triton.jit
def update(states, decays, x, MODES: tl.constexpr):
    """Return decay·state + x for each mode."""
    new_states = ()
    for mode in tl.static_range(MODES):
        new_states = new_states + (states[mode] * decays[mode] + x,)
    return new_states


@triton.jit
def scale(values, factor, MODES: tl.constexpr):
    scaled = ()
    for mode in tl.static_range(MODES):
        scaled = scaled + (values[mode] * factor,)
    return scaled


@triton.jit
def sum_products(total, a, b, MODES: tl.constexpr):
    """Return total + Σ a·b over modes, in two chains of multiply-adds."""
    second = total * 0.0
    for mode in tl.static_range(0, MODES, 2):
        total += a[mode] * b[mode]
        if mode + 1 < MODES:
            second += a[mode + 1] * b[mode + 1]
    return total + second


@triton.jit
def multiply(a, b, GATED: tl.constexpr):
    """Return a ⊙ b in fp32, rounded to their dtype; without gates a."""
    product = a.to(tl.float32)
    if GATED:
        product = (product * b.to(tl.float32)).to(a.dtype).to(tl.float32)
    return product


@triton.jit
def find_start(positions, token, PACKED: tl.constexpr, UNROLL: tl.constexpr):
    """Return true if a document begins in one of the UNROLL tokens from `token` on."""
    starts = 0
    if PACKED:
        for step in tl.static_range(UNROLL):
            starts += (tl.load(positions + token + step) == 0).to(tl.int32)
    return starts > 0


@triton.jit
def keep_factor(positions, token):
    """Return 0.0 if a document begins at the token, else 1.0."""
    return (tl.load(positions + token) != 0).to(tl.float32)


@triton.jit
def multiply_by_mode(a, b, MODES: tl.constexpr):
    products = ()
    for mode in tl.static_range(MODES):
        products = products + (a[mode] * b[mode],)
    return products


@triton.jit
def add_decayed(x, decays, values, MODES: tl.constexpr):
    """Return decay·value + x, each with its mode's x."""
    new_values = ()
    for mode in tl.static_range(MODES):
        new_values = new_values + (values[mode] * decays[mode] + x[mode],)
    return new_values


@triton.jit
def add_tuple_products(sums, a, b, MODES: tl.constexpr):
    new_sums = ()
    for mode in tl.static_range(MODES):
        new_sums = new_sums + (sums[mode] + a[mode] * b[mode],)
    return new_sums


@triton.jit
def store_input_grads(ptrs, dw, k, v, width, channel_mask, GATED: tl.constexpr):
    """Store dk = dw ⊙ v and dv = dw ⊙ k, or dw."""
    dtype = ptrs.dtype.scalar.element_ty
    if GATED:
        tl.store(ptrs + width, (dw * v.to(tl.float32)).to(dtype), mask=channel_mask)
        tl.store(ptrs + 2 * width, (dw * k.to(tl.float32)).to(dtype), mask=channel_mask)
    else:
        tl.store(ptrs, dw.to(dtype), mask=channel_mask)


@triton.jit
def load_product(a, b, channel_mask, GATED: tl.constexpr):
    """Load a ⊙ b in fp32, rounded to their dtype; without gates a."""
    a_value = tl.load(a, mask=channel_mask)
    b_value = a_value
    if GATED:
        b_value = tl.load(b, mask=channel_mask)
    return multiply(a_value, b_value, GATED)


@triton.jit
def find_blocks(chunk, width, CHANNELS: tl.constexpr):
    """Return the index of the program's channels among all chunks' blocks, and among a filter's."""
    num_blocks = tl.cdiv(width, CHANNELS)
    block = tl.program_id(0) % num_blocks
    return chunk * num_blocks + block, block


@triton.jit
def modal_walk_chunk_states(
    x, positions, decays, contributions, length, width, tiles_per_chunk, num_chunks, row_stride,
    token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
    MODES: tl.constexpr, UNROLL: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Each chunk's contribution to the state at its last token e: Σ_t λ^{e−t}·w_t."""
    row, chunk, start, end, channel = program_chunk(
        length, width, tiles_per_chunk, num_chunks, TILE, CHANNELS
    )
    chunk_block, block = find_blocks(chunk, width, CHANNELS)
    channel_mask = None if ALL else channel < width
    x += row * row_stride + start.to(tl.int64) * token_stride
    key = x + (width if GATED else 0)
    value = x + (2 * width if GATED else 0)
    positions += row * length + start
    num_tokens = end - start
    decay = load_by_mode(decays + block * MODES * CHANNELS, MODES, CHANNELS)
    state = zero_sums(MODES, CHANNELS)
    for first in range(0, num_tokens, UNROLL):
        k = load_group(key, first, channel, channel_mask, token_stride, UNROLL)
        v = k
        if GATED:
            v = load_group(value, first, channel, channel_mask, token_stride, UNROLL)
        if find_start(positions, first, PACKED, UNROLL):
            for step in range(UNROLL):
                offsets = (first + step) * token_stride + channel
                w = load_product(key + offsets, value + offsets, channel_mask, GATED)
                state = scale(state, keep_factor(positions, first + step), MODES)
                state = update(state, decay, w, MODES)
        else:
            for step in tl.static_range(UNROLL):
                state = update(state, decay, multiply(k[step], v[step], GATED), MODES)
    store_by_mode(contributions + chunk_block * MODES * CHANNELS, state, MODES, CHANNELS)


@triton.jit
def modal_walk_outputs(
    x, gate, positions, decays, weights, direct, states, out, contributions, sums, length, width,
    tiles_per_chunk, num_chunks, x_row_stride, x_token_stride, gate_row_stride, gate_token_stride,
    out_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, BACKWARD: tl.constexpr, TILE: tl.constexpr,
    CHANNELS: tl.constexpr, MODES: tl.constexpr, UNROLL: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """y_t = q_t·(direct·w_t + Σ_n weight_n·S_{n,t−1}), from `states` at the chunks' starts; q is
    `gate`.

    BACKWARD: dq, where `gate` is dy; without gates none. And of each chunk `sums` [MODES + 1] =
    Σ_t p_t·S_{t−1}, Σ_t p_t·w_t, and its contribution to G at its first token k: Σ_t λ^{t−k}·p_t
    over the document there, 0 if that begins at k.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    row, chunk, start, end, channel = program_chunk(
        length, width, tiles_per_chunk, num_chunks, TILE, CHANNELS
    )
    chunk_block, block = find_blocks(chunk, width, CHANNELS)
    channel_mask = None if ALL else channel < width
    first_token = start.to(tl.int64)
    x += row * x_row_stride + first_token * x_token_stride
    key = x + (width if GATED else 0)
    value = x + (2 * width if GATED else 0)
    gate += row * gate_row_stride + first_token * gate_token_stride
    out += (row * length + first_token) * out_stride
    positions += row * length + start
    num_tokens = end - start
    decay = load_by_mode(decays + block * MODES * CHANNELS, MODES, CHANNELS)
    weight = load_by_mode(weights + block * MODES * CHANNELS, MODES, CHANNELS)
    direct_weight = tl.load(direct + channel, mask=channel_mask)
    state = load_by_mode(states + chunk_block * MODES * CHANNELS, MODES, CHANNELS)
    state_sums = zero_sums(MODES if BACKWARD else 0, CHANNELS)
    grad = state_sums
    power = ()
    for _ in tl.static_range(MODES if BACKWARD else 0):
        power = power + (tl.full([CHANNELS], 1.0, dtype=tl.float32),)
    direct_sum = tl.zeros([CHANNELS], dtype=tl.float32)
    for first in range(0, num_tokens, UNROLL):
        k = load_group(key, first, channel, channel_mask, x_token_stride, UNROLL)
        v = k
        gates = k
        q = k
        if GATED:
            v = load_group(value, first, channel, channel_mask, x_token_stride, UNROLL)
        if GATED or BACKWARD:
            gates = load_group(gate, first, channel, channel_mask, gate_token_stride, UNROLL)
        if GATED and BACKWARD:
            q = load_group(x, first, channel, channel_mask, x_token_stride, UNROLL)
        if find_start(positions, first, PACKED, UNROLL):
            for step in range(UNROLL):
                token = first + step
                offsets = token * x_token_stride + channel
                w = load_product(key + offsets, value + offsets, channel_mask, GATED)
                keep = keep_factor(positions, token)
                state = scale(state, keep, MODES)
                y = sum_products(direct_weight * w, weight, state, MODES)
                gate_ptrs = gate + token * gate_token_stride + channel
                if BACKWARD:
                    p = load_product(gate_ptrs, x + offsets, channel_mask, GATED)
                    state_sums = add_products(state_sums, state, p, MODES)
                    direct_sum += p * w
                    power = scale(power, keep, MODES)
                    grad = add_products(grad, power, p, MODES)
                    power = multiply_by_mode(power, decay, MODES)
                if GATED:
                    y *= tl.load(gate_ptrs, mask=channel_mask).to(tl.float32)
                if GATED or not BACKWARD:
                    tl.store(out + token * out_stride + channel, y.to(dtype), mask=channel_mask)
                state = update(state, decay, w, MODES)
        else:
            for step in tl.static_range(UNROLL):
                w = multiply(k[step], v[step], GATED)
                y = sum_products(direct_weight * w, weight, state, MODES)
                if BACKWARD:
                    p = multiply(gates[step], q[step], GATED)
                    state_sums = add_products(state_sums, state, p, MODES)
                    direct_sum += p * w
                    grad = add_products(grad, power, p, MODES)
                    power = multiply_by_mode(power, decay, MODES)
                if GATED:
                    y *= gates[step].to(tl.float32)
                if GATED or not BACKWARD:
                    offsets = (first + step) * out_stride + channel
                    tl.store(out + offsets, y.to(dtype), mask=channel_mask)
                state = update(state, decay, w, MODES)
    if BACKWARD:
        store_by_mode(contributions + chunk_block * MODES * CHANNELS, grad, MODES, CHANNELS)
        sums += chunk_block * (MODES + 1) * CHANNELS
        store_by_mode(sums, state_sums, MODES, CHANNELS)
        tl.store(sums + MODES * CHANNELS + tl.arange(0, CHANNELS), direct_sum)


@triton.jit
def modal_walk_inputs(
    dy, x, positions, decays, weights, direct, states, chunk_grads, grad_x, sums, length, width,
    tiles_per_chunk, num_chunks, row_stride, token_stride,
    GATED: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
    MODES: tl.constexpr, UNROLL: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """dw_t = direct·p_t + Σ_n weight_n·G_{n,t+1},  dk = dw ⊙ v,  dv = dw ⊙ k.

    `chunk_grads` holds G after each chunk, `states` S before it. `sums` [MODES] of a chunk receives
    Σ_t G_t·S_{t−1}. The walk from the end knows no S; by pairs of tokens, the sum over a chunk that
    begins at k is

        Σ_s w_s·E_s + S_{k−1}·E_{k−1},   E_s = G_{s+1} + λ·E_{s+1}  from 0 at the chunk's end
    """
    row, chunk, start, end, channel = program_chunk(
        length, width, tiles_per_chunk, num_chunks, TILE, CHANNELS
    )
    chunk_block, block = find_blocks(chunk, width, CHANNELS)
    channel_mask = None if ALL else channel < width
    first_token = start.to(tl.int64)
    x += row * row_stride + first_token * token_stride
    key = x + (width if GATED else 0)
    value = x + (2 * width if GATED else 0)
    dy += (row * length + first_token) * width
    out_stride = width * (3 if GATED else 1)
    grad_x += (row * length + first_token) * out_stride
    positions += row * length + start
    num_tokens = end - start
    decay = load_by_mode(decays + block * MODES * CHANNELS, MODES, CHANNELS)
    weight = load_by_mode(weights + block * MODES * CHANNELS, MODES, CHANNELS)
    direct_weight = tl.load(direct + channel, mask=channel_mask)
    grad = load_by_mode(chunk_grads + chunk_block * MODES * CHANNELS, MODES, CHANNELS)
    reach = zero_sums(MODES, CHANNELS)
    decay_sums = zero_sums(MODES, CHANNELS)
    for walked in range(0, num_tokens, UNROLL):
        first = num_tokens - UNROLL - walked
        k = load_group(key, first, channel, channel_mask, token_stride, UNROLL)
        dy_tokens = load_group(dy, first, channel, channel_mask, width, UNROLL)
        v = k
        q = k
        if GATED:
            v = load_group(value, first, channel, channel_mask, token_stride, UNROLL)
            q = load_group(x, first, channel, channel_mask, token_stride, UNROLL)
        if find_start(positions, first, PACKED, UNROLL):
            for step in range(UNROLL):
                token = first + UNROLL - 1 - step
                offsets = token * token_stride + channel
                k_value = tl.load(key + offsets, mask=channel_mask)
                v_value = tl.load(value + offsets, mask=channel_mask)
                w = multiply(k_value, v_value, GATED)
                p = load_product(dy + token * width + channel, x + offsets, channel_mask, GATED)
                dw = sum_products(direct_weight * p, weight, grad, MODES)
                decay_sums = add_products(decay_sums, reach, w, MODES)
                keep = keep_factor(positions, token)
                grad = update(grad, decay, p, MODES)
                reach = scale(add_decayed(grad, decay, reach, MODES), keep, MODES)
                grad = scale(grad, keep, MODES)
                ptrs = grad_x + token * out_stride + channel
                store_input_grads(ptrs, dw, k_value, v_value, width, channel_mask, GATED)
        else:
            for step in tl.static_range(UNROLL - 1, -1, -1):
                w = multiply(k[step], v[step], GATED)
                p = multiply(dy_tokens[step], q[step], GATED)
                dw = sum_products(direct_weight * p, weight, grad, MODES)
                decay_sums = add_products(decay_sums, reach, w, MODES)
                grad = update(grad, decay, p, MODES)
                reach = add_decayed(grad, decay, reach, MODES)
                ptrs = grad_x + (first + step) * out_stride + channel
                store_input_grads(ptrs, dw, k[step], v[step], width, channel_mask, GATED)
    state = load_by_mode(states + chunk_block * MODES * CHANNELS, MODES, CHANNELS)
    decay_sums = add_tuple_products(decay_sums, state, reach, MODES)
    store_by_mode(sums + chunk_block * MODES * CHANNELS, decay_sums, MODES, CHANNELS)
