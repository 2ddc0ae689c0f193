"""Shared functions for modal.py: token blocks as matrices, for filters with decaying states.

Tokens are [CHANNELS, BLOCK, BLOCKS], states [CHANNELS · PARTS, MODES, BLOCKS]: a channel's states
are divided into PARTS with MODES each, and products are per part. No two warps share a channel or
part.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Products. The matrix units round their inputs: a number that needs more bits is a sum of terms.


@triton.jit
def split_terms(x, dtype: tl.constexpr, COUNT: tl.constexpr):
    """Split x into a sum of `dtype` terms, largest first; for fp32, terms that tf32 holds."""
    parts = ()
    for _ in tl.static_range(COUNT):
        if dtype == tl.float32:
            term = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        else:
            term = x.to(dtype)
        parts = parts + (term,)
        x = x.to(tl.float32) - term.to(tl.float32)
    return parts


@triton.jit
def dot_add(accumulator, a, b, A: tl.constexpr, B: tl.constexpr):
    """Return accumulator + a·b, without products of small terms; a has A terms, b has B ≤ A."""
    for rank in tl.static_range(A - 1, -1, -1):  # smallest first
        for index in tl.static_range(A):
            if index <= rank:
                if rank - index < B:
                    accumulator = tl.dot(
                        a[index], b[rank - index], accumulator, input_precision="tf32",
                        out_dtype=tl.float32,
                    )  # fmt: skip
    return accumulator


@triton.jit
def dot_transposed_add(accumulator, a, b, TERMS: tl.constexpr):
    """Return accumulator + a·bᵀ."""
    transposed = ()
    for term in tl.static_range(TERMS):
        transposed = transposed + (tl.permute(b[term], 0, 2, 1),)
    return dot_add(accumulator, a, transposed, TERMS, TERMS)


# Work of a program: a chunk of a row, from `start` to `end`, one tile at a time


@triton.jit
def program_chunk(
    length, width, tiles_per_chunk, num_chunks, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Return the row, the chunk's number in it and among all, its start and end, the channels."""
    program = tl.program_id(0)  # adjacent programs read adjacent channels
    num_blocks = tl.cdiv(width, CHANNELS)
    channel = program % num_blocks * CHANNELS + tl.arange(0, CHANNELS)
    row = (program // num_blocks // num_chunks).to(tl.int64)
    chunk = program // num_blocks % num_chunks
    start = chunk * tiles_per_chunk * TOKENS
    return (
        row,
        row * num_chunks + chunk,
        start,
        tl.minimum(start + tiles_per_chunk * TOKENS, length),
        channel,
    )


@triton.jit
def tile_tokens(BLOCK: tl.constexpr, BLOCKS: tl.constexpr, REVERSED: tl.constexpr):
    """Return each token's index in its tile, [BLOCK, BLOCKS]; REVERSED reverses each block."""
    token = tl.arange(0, BLOCK)
    if REVERSED:
        token = BLOCK - 1 - token
    return token[:, None] + BLOCK * tl.arange(0, BLOCKS)[None, :]


@triton.jit
def load_tile(x, token_stride, tile, token, start, end, channel, width):
    """Load the tile's tokens; zeros outside the chunk."""
    mask = (tile + token >= start) & (tile + token < end)
    mask = mask[None, :, :] & (channel < width)[:, None, None]
    ptrs = (
        x
        + tile.to(tl.int64) * token_stride
        + token[None, :, :] * token_stride
        + channel[:, None, None]
    )
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_product(
    a, b, a_stride, b_stride, tile, token, start, end, channel, width,
    GATED: tl.constexpr,
):  # fmt: skip
    """Return a ⊙ b in their own type, or a alone without gates."""
    product = load_tile(a, a_stride, tile, token, start, end, channel, width)
    if GATED:
        factor = load_tile(b, b_stride, tile, token, start, end, channel, width)
        product = (product.to(tl.float32) * factor.to(tl.float32)).to(product.dtype)
    return product


@triton.jit
def store_tile(x, token_stride, tile, token, end, channel, width, values):
    """Store values [CHANNELS, BLOCK, BLOCKS] for the tile's tokens."""
    mask = (tile + token < end)[None, :, :] & (channel < width)[:, None, None]
    ptrs = (
        x
        + tile.to(tl.int64) * token_stride
        + token[None, :, :] * token_stride
        + channel[:, None, None]
    )
    tl.store(ptrs, values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _mode_offsets(modes, channel, width, MODES: tl.constexpr, PARTS: tl.constexpr):
    """Return pointers [CHANNELS · PARTS, MODES] into a tensor stored mode by mode, and the mask."""
    mode = tl.arange(0, MODES)[None, :]
    if PARTS > 1:
        part = tl.arange(0, channel.shape[0] * PARTS) % PARTS
        mode += part[:, None] * MODES
        repeated = tl.broadcast_to(channel[:, None], [channel.shape[0], PARTS])
        channel = tl.reshape(repeated, [channel.shape[0] * PARTS])
    return modes + mode * width + channel[:, None], (channel < width)[:, None]


@triton.jit
def load_modes(modes, channel, width, MODES: tl.constexpr, PARTS: tl.constexpr):
    """Load [CHANNELS · PARTS, MODES] from a tensor stored mode by mode."""
    ptrs, mask = _mode_offsets(modes, channel, width, MODES, PARTS)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_modes(modes, channel, width, values, MODES: tl.constexpr, PARTS: tl.constexpr):
    """Store values [CHANNELS · PARTS, MODES] mode by mode."""
    ptrs, mask = _mode_offsets(modes, channel, width, MODES, PARTS)
    tl.store(ptrs, values, mask=mask)


@triton.jit
def repeat_for_parts(x, PARTS: tl.constexpr):
    """Repeat each channel's tokens for its parts."""
    if PARTS > 1:
        repeated = tl.broadcast_to(x[:, None, :, :], [x.shape[0], PARTS, x.shape[1], x.shape[2]])
        x = tl.reshape(repeated, [x.shape[0] * PARTS, x.shape[1], x.shape[2]])
    return x


# Documents


@triton.jit
def document_segments(positions, tile, token, start, end, REVERSED: tl.constexpr):
    """Count the document starts in a token's block up to the token, and in each block."""
    mask = (tile + token >= start) & (tile + token < end)
    starts = (tl.load(positions + tile + token, mask=mask, other=1) == 0).to(tl.int32)
    count = tl.sum(starts, 0)
    segment = tl.cumsum(starts, 0)
    if REVERSED:
        segment = count[None, :] - segment + starts
    return segment, count


@triton.jit
def select_segment(x, segment, index, PACKED: tl.constexpr):
    """Keep x in the segments with this index; zeros elsewhere."""
    if PACKED:
        x = tl.where((segment == index)[None, :, :], x, 0.0)
    return x


# The filter


@triton.jit
def decay_powers(rate, ages, MODES_LAST: tl.constexpr):
    """Return λ^age for each age, [CHANNELS, MODES, AGES]; MODES_LAST swaps the last two axes."""
    if MODES_LAST:
        exponents = rate[:, None, :] * ages[None, :, None]
    else:
        exponents = rate[:, :, None] * ages[None, None, :]
    return tl.exp(-exponents)


@triton.jit
def load_matrix(taps, channel, width, BLOCK: tl.constexpr):
    """Return [CHANNELS, BLOCK, BLOCK]: the taps between a block's tokens."""
    token = tl.arange(0, BLOCK)
    lag = (token[:, None] - token[None, :])[None, :, :]
    channel = channel[:, None, None]
    return tl.load(taps + channel * BLOCK + lag, mask=(lag >= 0) & (channel < width), other=0.0)


@triton.jit
def filter_block(
    matrix, spread, x, states, segment, reached_segment, last_segment,
    INPUTS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the filter's outputs y = matrix·x + spread·states, where the states at a block's start
    reach only the tokens in its segment `reached_segment`."""
    y = tl.zeros([states.shape[0], x.shape[1], x.shape[2]], dtype=tl.float32)
    y = dot_add(y, spread, split_terms(states, tl.float32, 2), 2, 2)
    if PARTS > 1:
        y = tl.sum(tl.reshape(y, [x.shape[0], PARTS, x.shape[1], x.shape[2]]), 1)
    if PACKED:
        y = select_segment(y, segment, reached_segment, True)
        for index in range(last_segment + 1):
            segment_terms = split_terms(select_segment(x, segment, index, True), x.dtype, INPUTS)
            segment_outputs = dot_add(
                tl.zeros(x.shape, dtype=tl.float32), matrix, segment_terms, 2, INPUTS
            )
            y += select_segment(segment_outputs, segment, index, True)
    else:
        y = dot_add(y, matrix, split_terms(x, x.dtype, INPUTS), 2, INPUTS)
    return y


@triton.jit
def scan_blocks(
    contributions, decay, unbroken, state,
    CHANNELS: tl.constexpr, MODES: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """S ← decay·S + contribution from block to block: return the states at block starts and at the
    tile's end, from `state` at the tile's start; BACKWARD: from the end to the start.

    A tree scan: block pairs are joined upwards, then their entering states are passed down.
    """
    decay = decay[:, :, None]
    passes = unbroken[None, None, :]
    siblings = ()
    sibling_decays = ()
    for level in tl.static_range(LEVELS):
        first, second = tl.split(
            tl.reshape(contributions, [CHANNELS, MODES, BLOCKS >> (level + 1), 2])
        )
        first_decay, second_decay = decay, decay
        if PACKED:
            first_passes, second_passes = tl.split(
                tl.reshape(passes, [1, 1, BLOCKS >> (level + 1), 2])
            )
            first_decay, second_decay = decay * first_passes, decay * second_passes
            passes = first_passes * second_passes
        siblings = siblings + (second if BACKWARD else first,)
        sibling_decays = sibling_decays + (second_decay if BACKWARD else first_decay,)
        contributions = first + first_decay * second if BACKWARD else second + second_decay * first
        decay *= decay
    entering = state[:, :, None]
    final = tl.reshape(
        contributions + decay * entering * (passes if PACKED else 1.0), [CHANNELS, MODES]
    )
    for level in tl.static_range(LEVELS - 1, -1, -1):
        joined = siblings[level] + sibling_decays[level] * entering
        entering = tl.join(joined, entering) if BACKWARD else tl.join(entering, joined)
        entering = tl.reshape(entering, [CHANNELS, MODES, BLOCKS >> level])
    return entering, final
