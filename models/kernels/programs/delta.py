"""Triton programs for delta.py: decays, scores, the triangular system, states, outputs.

    (I + M)·D = β·(V − (e^G ⊙ K)·S),  Y = (e^G ⊙ Q)·S + P·D
    S ← e^{G_end} ⊙ S + (e^{G_end−G} ⊙ K)ᵀ·D

A chunk has CHUNK tokens; S [KEY_DIM, VALUES] is the state before it. G_t = Σ_{r≤t} g_r counts from
the chunk's start: one number for a token or, BY_CHANNEL, one for each key channel, [rows, heads,
padded_length, 1 or key_dim] in fp32. Heads are those of values; `heads_per_key` share a key. Decays
are zero across a document's start.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ssd import document_masks, load_positions, load_tile


@triton.jit
def load_decays(
    G, first_token, key_dim, first_channel, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Load G of TOKENS tokens, [TOKENS, CHANNELS] or [TOKENS, 1]."""
    token = first_token + tl.arange(0, TOKENS)[:, None]
    if BY_CHANNEL:
        channel = first_channel + tl.arange(0, CHANNELS)[None, :]
        decays = tl.load(G + token * key_dim + channel, mask=channel < key_dim, other=0.0)
    else:
        decays = tl.load(G + token)
    return decays


@triton.jit
def load_key_decays(
    G, token, key_dim, first_channel, CHANNELS: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """Load G of one token, [CHANNELS], or [1] for all channels."""
    if BY_CHANNEL:
        channel = first_channel + tl.arange(0, CHANNELS)
        decays = tl.load(G + token * key_dim + channel, mask=channel < key_dim, other=0.0)
    else:
        decays = tl.load(G + token + tl.arange(0, 1))
    return decays


@triton.jit
def load_token(x, token_stride, token, length, width, WIDTH: tl.constexpr):
    """Load one token in fp32, [WIDTH], or zeros outside the row."""
    column = tl.arange(0, WIDTH)
    mask = (column < width) & (token + tl.zeros_like(column) < length)
    return tl.load(x + token.to(tl.int64) * token_stride + column, mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def multiply(a, b, PRECISION: tl.constexpr):
    """Return a·b in fp32."""
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def load_square(x, SIZE: tl.constexpr):
    """Load a matrix [SIZE, SIZE]."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    return tl.load(x + row * SIZE + column)


@triton.jit
def visible_pairs(positions, first_token, length, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Return where s ≤ t are in one document, [t, s], and the distances t − s."""
    token = tl.arange(0, CHUNK)
    distance = token[:, None] - token[None, :]
    mask = distance >= 0
    if PACKED:
        position = load_positions(positions, first_token, length, CHUNK, PACKED)
        mask = mask & (distance <= position[:, None])
    return mask, distance


@triton.jit
def delta_cumsum(
    g, out, length, padded_length, num_heads, width,
    REVERSE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """G_t = Σ_{r≤t} g_r within a chunk, from g [rows, length, heads, width] to [rows, heads,
    padded_length, width]. REVERSE: dg_t = Σ_{r≥t} dG_r, with the layouts exchanged."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    tokens = ((row * length + token) * num_heads + head) * width + channel
    padded = ((row * num_heads + head) * padded_length + token) * width + channel
    mask = (token < length) & (channel < width)
    if REVERSE:
        dG = tl.load(g + padded, mask=channel < width, other=0.0)
        tl.store(out + tokens, tl.cumsum(dG, axis=0, reverse=True), mask=mask)
    else:
        g_t = tl.load(g + tokens, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + padded, tl.cumsum(g_t, axis=0), mask=channel < width)


@triton.jit
def delta_scores(
    q, k, beta, G, positions, M, P, length, padded_length, num_heads, heads_per_key, key_dim,
    q_row_stride, q_token_stride, k_row_stride, k_token_stride,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M_ts = β_t·(k_t·k_s)·e^{G_t−G_s} for s < t and P_ts = (q_t·k_s)·e^{G_t−G_s} for s ≤ t, with
    one decay for a token."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, first_token = head // heads_per_key, chunk * CHUNK
    q_tile = load_tile(
        q + row * q_row_stride + key_head * key_dim, q_token_stride, first_token, length, key_dim,
        CHUNK, KEY_DIM,
    )  # fmt: skip
    k_tile = load_tile(
        k + row * k_row_stride + key_head * key_dim, k_token_stride, first_token, length, key_dim,
        CHUNK, KEY_DIM,
    )  # fmt: skip
    G += (row * num_heads + head) * padded_length
    token = tl.arange(0, CHUNK)
    G_t = tl.load(G + first_token + token)
    mask, distance = visible_pairs(positions + row * length, first_token, length, CHUNK, PACKED)
    decay = tl.exp(tl.where(mask, G_t[:, None] - G_t[None, :], float("-inf")))
    token_mask = first_token + token < length
    beta_t = tl.load(
        beta + (row * length + first_token + token) * num_heads + head, mask=token_mask, other=0.0
    )
    keys = multiply(k_tile, tl.trans(k_tile), PRECISION) * decay
    queries = multiply(q_tile, tl.trans(k_tile), PRECISION) * decay
    offset = ((row * num_heads + head) * padded_length + first_token) * CHUNK
    pairs = offset + token[:, None] * CHUNK + token[None, :]
    tl.store(M + pairs, tl.where(distance > 0, keys * beta_t[:, None], 0.0))
    tl.store(P + pairs, queries.to(P.dtype.element_ty))


@triton.jit
def delta_channel_scores(
    q, k, beta, G, positions, M, P, length, padded_length, num_heads, heads_per_key, key_dim,
    q_row_stride, q_token_stride, k_row_stride, k_token_stride,
    PACKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, KEY_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `delta_scores`, with a decay for each channel: BLOCK rows of M and P.

    Pairs with earlier blocks are products, with decays up to and from G of the block's first
    token; pairs within the block are summed one column at a time. No exponent is above zero.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    chunk_token = block * BLOCK // CHUNK * CHUNK
    first_token = block * BLOCK
    start = first_token - chunk_token  # of the block, within the chunk
    key_head = head // heads_per_key
    q += row * q_row_stride + key_head * key_dim
    k += row * k_row_stride + key_head * key_dim
    G += (row * num_heads + head) * padded_length * key_dim
    token = tl.arange(0, BLOCK)
    q_t = load_tile(q, q_token_stride, first_token, length, key_dim, BLOCK, KEY_DIM)
    k_t = load_tile(k, k_token_stride, first_token, length, key_dim, BLOCK, KEY_DIM)
    G_t = load_decays(G, first_token, key_dim, 0, BLOCK, KEY_DIM, True)
    boundary = load_key_decays(G, first_token, key_dim, 0, KEY_DIM, True)[None, :]
    beta_t = tl.load(
        beta + (row * length + first_token + token) * num_heads + head,
        mask=first_token + token < length, other=0.0,
    )[:, None]  # fmt: skip
    position = token
    if PACKED:
        position = tl.load(
            positions + row * length + first_token + token, mask=first_token + token < length,
            other=0,
        ).to(tl.int32)  # fmt: skip
    offset = ((row * num_heads + head) * padded_length + first_token) * CHUNK
    rows = offset + token[:, None] * CHUNK + token[None, :]

    dtype: tl.constexpr = q.dtype.element_ty
    from_boundary = tl.exp(G_t - boundary)
    q_from, k_from = (q_t * from_boundary).to(dtype), (k_t * from_boundary).to(dtype)
    for pair_block in range(CHUNK // BLOCK):
        pair_token = chunk_token + pair_block * BLOCK
        distance = start + token[:, None] - pair_block * BLOCK - token[None, :]
        keys = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        queries = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        if pair_block * BLOCK < start:
            k_s = load_tile(k, k_token_stride, pair_token, length, key_dim, BLOCK, KEY_DIM)
            G_s = load_decays(G, pair_token, key_dim, 0, BLOCK, KEY_DIM, True)
            k_to = tl.trans((k_s * tl.exp(boundary - G_s)).to(dtype))
            keys = multiply(k_from, k_to, PRECISION)
            queries = multiply(q_from, k_to, PRECISION)
        elif pair_block * BLOCK == start:
            for column in range(BLOCK):
                source = first_token + column
                k_s = load_token(k, k_token_stride, source, length, key_dim, KEY_DIM)[None, :]
                G_s = load_key_decays(G, source, key_dim, 0, KEY_DIM, True)[None, :]
                later = (token >= column)[:, None]
                decayed = k_s * tl.exp(tl.where(later, G_t - G_s, float("-inf")))
                selected = token[None, :] == column
                keys += tl.where(selected, tl.sum(k_t * decayed, axis=1)[:, None], 0.0)
                queries += tl.where(selected, tl.sum(q_t * decayed, axis=1)[:, None], 0.0)
        mask = distance >= 0
        if PACKED:
            mask = mask & (distance <= position[:, None])
        pairs = rows + pair_block * BLOCK
        tl.store(M + pairs, tl.where(mask & (distance > 0), keys * beta_t, 0.0))
        tl.store(P + pairs, tl.where(mask, queries, 0.0).to(P.dtype.element_ty))


@triton.jit
def merge_inverses(X, SIZE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Merge the inverses of neighbouring diagonal blocks of SIZE rows in X [CHUNK, CHUNK], whose
    other blocks hold I + M: [A, 0; B, C]⁻¹ = [A⁻¹, 0; −C⁻¹·B·A⁻¹, C⁻¹]."""
    pair = tl.arange(0, CHUNK // (2 * SIZE))[:, None, None]
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    first = X + pair * 2 * SIZE * (CHUNK + 1) + row * CHUNK + column
    product = multiply(
        tl.load(first + SIZE * (CHUNK + 1)), tl.load(first + SIZE * CHUNK), PRECISION
    )
    product = -multiply(product, tl.load(first), PRECISION)
    tl.debug_barrier()
    tl.store(first + SIZE * CHUNK, product)
    tl.debug_barrier()


@triton.jit
def delta_invert(M, inverses, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + M)⁻¹ of a chunk, from blocks of BLOCK rows up. M holds intermediate results, in fp32."""
    offset = tl.program_id(0).to(tl.int64) * CHUNK * CHUNK
    M += offset
    block = tl.arange(0, CHUNK // BLOCK)[:, None, None]
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    block_ptrs = M + block * BLOCK * (CHUNK + 1) + row * CHUNK + column
    blocks = tl.load(block_ptrs)
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(blocks)
    for power in tl.static_range(4):  # the same within blocks
        size = 1 << power
        coupling = (row // size % 2 == 1) & (row // size == column // size + 1)
        X -= multiply(multiply(X, tl.where(coupling, blocks, 0.0), PRECISION), X, PRECISION)
    tl.debug_barrier()
    tl.store(block_ptrs, X)
    tl.debug_barrier()
    if CHUNK > 16:
        merge_inverses(M, 16, CHUNK, PRECISION)
    if CHUNK > 32:
        merge_inverses(M, 32, CHUNK, PRECISION)
    token = tl.arange(0, CHUNK)
    pairs = token[:, None] * CHUNK + token[None, :]
    tl.store(inverses + offset + pairs, tl.load(M + pairs).to(inverses.dtype.element_ty))


@triton.jit
def delta_solve(
    k, v, beta, G, positions, inverses, W, U, length, padded_length, num_heads, heads_per_key,
    key_dim, value_dim, k_row_stride, k_token_stride, v_row_stride, v_token_stride,
    PACKED: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """W = (I + M)⁻¹·(β·e^G ⊙ K) and U = (I + M)⁻¹·(β·V)."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    first_token, head_row = chunk * CHUNK, row * num_heads + head
    inverse = load_square(inverses + (head_row * padded_length + first_token) * CHUNK, CHUNK)
    token = tl.arange(0, CHUNK)
    beta_t = tl.load(
        beta + (row * length + first_token + token) * num_heads + head,
        mask=first_token + token < length, other=0.0,
    )[:, None]  # fmt: skip
    start_mask, _, _ = document_masks(positions + row * length, first_token, length, CHUNK, PACKED)
    decays = key_dim if BY_CHANNEL else 1
    G_t = load_decays(
        G + head_row * padded_length * decays, first_token, key_dim, 0, CHUNK, KEY_DIM, BY_CHANNEL
    )
    from_start = tl.where(start_mask[:, None], tl.exp(G_t), 0.0)
    k_tile = load_tile(
        k + row * k_row_stride + head // heads_per_key * key_dim, k_token_stride, first_token,
        length, key_dim, CHUNK, KEY_DIM,
    )  # fmt: skip
    W_tile = multiply(inverse, (k_tile * from_start * beta_t).to(dtype), PRECISION)
    offsets = head_row * padded_length + first_token + token[:, None]
    channel = tl.arange(0, KEY_DIM)[None, :]
    tl.store(W + offsets * key_dim + channel, W_tile.to(dtype), mask=channel < key_dim)
    for first_value in range(0, value_dim, VALUES):
        v_tile = load_tile(
            v + row * v_row_stride + head * value_dim + first_value, v_token_stride, first_token,
            length, value_dim - first_value, CHUNK, VALUES,
        )  # fmt: skip
        U_tile = multiply(inverse, (v_tile * beta_t).to(dtype), PRECISION)
        value = first_value + tl.arange(0, VALUES)[None, :]
        tl.store(U + offsets * value_dim + value, U_tile.to(dtype), mask=value < value_dim)


@triton.jit
def state_offsets(state_dim, key_dim, first_value, KEY_DIM: tl.constexpr, VALUES: tl.constexpr):
    """Return a state tile's offsets [KEY_DIM, VALUES], and their mask."""
    channel = tl.arange(0, KEY_DIM)[:, None]
    value = first_value + tl.arange(0, VALUES)[None, :]
    return channel * state_dim + value, (channel < key_dim) & (value < state_dim)


@triton.jit
def delta_states(
    k, W, U, G, positions, initial, states, D, final, length, padded_length, num_chunks, num_heads,
    heads_per_key, key_dim, state_dim, k_row_stride, k_token_stride,
    PACKED: tl.constexpr, BY_CHANNEL: tl.constexpr, START: tl.constexpr, ADD: tl.constexpr,
    WRITE: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """D = U − W·S and S ← e^{G_end} ⊙ S + (e^{G_end−G} ⊙ K)ᵀ·D from chunk to chunk, from `initial`
    (START) or zeros to `final`. WRITE stores each chunk's D and the S before it.

    Without ADD, U is zero and S begins with the identity: the transition matrix.
    """
    first_value = tl.program_id(0) * VALUES
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    head_row = row * num_heads + head
    k += row * k_row_stride + head // heads_per_key * key_dim
    decays = key_dim if BY_CHANNEL else 1
    G += head_row * padded_length * decays
    offsets, mask = state_offsets(state_dim, key_dim, first_value, KEY_DIM, VALUES)
    state = tl.zeros([KEY_DIM, VALUES], dtype=tl.float32)
    if START:
        state += tl.load(initial + head_row * key_dim * state_dim + offsets, mask=mask, other=0.0)
    if not ADD:
        channel = tl.arange(0, KEY_DIM)[:, None]
        state += tl.where(channel == first_value + tl.arange(0, VALUES)[None, :], 1.0, 0.0)
    for chunk in range(num_chunks):
        first_token = chunk * CHUNK
        if WRITE:
            state_ptrs = states + (head_row * num_chunks + chunk) * key_dim * state_dim + offsets
            tl.store(state_ptrs, state.to(states.dtype.element_ty), mask=mask)
        W_tile = load_tile(
            W + head_row * padded_length * key_dim, key_dim, first_token, padded_length, key_dim,
            CHUNK, KEY_DIM,
        )  # fmt: skip
        D_tile = -multiply(W_tile, state.to(dtype), PRECISION)
        tokens = head_row * padded_length + first_token + tl.arange(0, CHUNK)[:, None]
        value = first_value + tl.arange(0, VALUES)[None, :]
        if ADD:
            D_tile += tl.load(U + tokens * state_dim + value, mask=value < state_dim, other=0.0)
        if WRITE:
            tl.store(D + tokens * state_dim + value, D_tile.to(dtype), mask=value < state_dim)
        G_t = load_decays(G, first_token, key_dim, 0, CHUNK, KEY_DIM, BY_CHANNEL)
        G_end = load_key_decays(G, first_token + CHUNK - 1, key_dim, 0, KEY_DIM, BY_CHANNEL)
        _, end_mask, unbroken = document_masks(
            positions + row * length, first_token, length, CHUNK, PACKED
        )
        to_end = tl.where(end_mask[:, None], tl.exp(G_end[None, :] - G_t), 0.0)
        k_tile = load_tile(k, k_token_stride, first_token, length, key_dim, CHUNK, KEY_DIM)
        decayed_k = tl.trans((k_tile * to_end).to(dtype))
        state = state * (tl.exp(G_end) * unbroken)[:, None]
        state += multiply(decayed_k, D_tile.to(dtype), PRECISION)
    tl.store(final + head_row * key_dim * state_dim + offsets, state, mask=mask)


@triton.jit
def delta_outputs(
    q, G, positions, states, P, D, out, length, padded_length, num_chunks, num_heads,
    heads_per_key, key_dim, value_dim, q_row_stride, q_token_stride,
    PACKED: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y = (e^G ⊙ Q)·S + P·D, for VALUES value channels of a chunk."""
    chunk, head = tl.program_id(0), tl.program_id(1) % num_heads
    first_value = tl.program_id(1) // num_heads * VALUES
    row = tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    head_row, first_token = row * num_heads + head, chunk * CHUNK
    q_tile = load_tile(
        q + row * q_row_stride + head // heads_per_key * key_dim, q_token_stride, first_token,
        length, key_dim, CHUNK, KEY_DIM,
    )  # fmt: skip
    decays = key_dim if BY_CHANNEL else 1
    G_t = load_decays(
        G + head_row * padded_length * decays, first_token, key_dim, 0, CHUNK, KEY_DIM, BY_CHANNEL
    )
    start_mask, _, _ = document_masks(positions + row * length, first_token, length, CHUNK, PACKED)
    decayed_q = (q_tile * tl.where(start_mask[:, None], tl.exp(G_t), 0.0)).to(dtype)
    offsets, mask = state_offsets(value_dim, key_dim, first_value, KEY_DIM, VALUES)
    state_ptrs = states + (head_row * num_chunks + chunk) * key_dim * value_dim + offsets
    y = multiply(decayed_q, tl.load(state_ptrs, mask=mask, other=0.0), PRECISION)
    token = tl.arange(0, CHUNK)[:, None]
    value = first_value + tl.arange(0, VALUES)[None, :]
    D_tile = tl.load(
        D + (head_row * padded_length + first_token + token) * value_dim + value,
        mask=value < value_dim, other=0.0,
    )  # fmt: skip
    P_tile = load_square(P + (head_row * padded_length + first_token) * CHUNK, CHUNK)
    y += multiply(P_tile, D_tile, PRECISION)
    out_ptrs = out + ((row * length + first_token + token) * num_heads + head) * value_dim + value
    mask = (first_token + token < length) & (value < value_dim)
    tl.store(out_ptrs, y.to(out.dtype.element_ty), mask=mask)
