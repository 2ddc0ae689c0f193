"""Shared functions of modal.py: blocks of tokens as matrices, for filters of decaying states.

Tokens are [CHANNELS, BLOCK, BLOCKS], states [CHANNELS · PARTS, MODES, BLOCKS]: the states of a
channel are divided into PARTS of MODES, and each part has its own products. Each warp has its own
channels or parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Products. The matrix units round their inputs: a number that needs more bits is a sum of terms.


@triton.jit
def split_terms(x, kind: tl.constexpr, COUNT: tl.constexpr):
    """Split x into a sum of terms of one type, largest first; for fp32, terms that tf32 holds."""
    found = ()
    for _ in tl.static_range(COUNT):
        if kind == tl.float32:
            term = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        else:
            term = x.to(kind)
        found = found + (term,)
        x = x.to(tl.float32) - term.to(tl.float32)
    return found


@triton.jit
def dot_add(total, a, b, A: tl.constexpr, B: tl.constexpr):
    """Return total + a·b for a of A and b of B ≤ A terms, without products of two small terms."""
    for rank in tl.static_range(A - 1, -1, -1):  # smallest first
        for one in tl.static_range(A):
            if one <= rank:
                if rank - one < B:
                    total = tl.dot(
                        a[one], b[rank - one], total, input_precision="tf32", out_dtype=tl.float32
                    )  # fmt: skip
    return total


@triton.jit
def dot_transposed_add(total, a, b, TERMS: tl.constexpr):
    """Return total + a·bᵀ."""
    turned = ()
    for term in tl.static_range(TERMS):
        turned = turned + (tl.permute(b[term], 0, 2, 1),)
    return dot_add(total, a, turned, TERMS, TERMS)


# Work of a program: a chunk of a row, from `start` to `end`, one tile at a time


@triton.jit
def program_chunk(length, width, each, chunks, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the row, the chunk's number in it and among all, its start and end, the channels."""
    program = tl.program_id(0)  # adjacent programs read adjacent channels
    parts = tl.cdiv(width, CHANNELS)
    channel = program % parts * CHANNELS + tl.arange(0, CHANNELS)
    row = (program // parts // chunks).to(tl.int64)
    chunk = program // parts % chunks
    start = chunk * each * TOKENS
    return row, row * chunks + chunk, start, tl.minimum(start + each * TOKENS, length), channel


@triton.jit
def tile_tokens(BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TURNED: tl.constexpr):
    """Return each token's place in its tile; TURNED reverses the tokens of each block."""
    token = tl.arange(0, BLOCK)
    if TURNED:
        token = BLOCK - 1 - token
    return token[:, None] + BLOCK * tl.arange(0, BLOCKS)[None, :]


@triton.jit
def load_tile(x, stride, tile, at, start, end, channel, width):
    """Load the tile's tokens; zeros outside the chunk."""
    here = (tile + at >= start) & (tile + at < end)
    here = here[None, :, :] & (channel < width)[:, None, None]
    place = x + tile.to(tl.int64) * stride + at[None, :, :] * stride + channel[:, None, None]
    return tl.load(place, mask=here, other=0.0)


@triton.jit
def load_product(
    a, b, a_stride, b_stride, tile, at, start, end, channel, width, GATED: tl.constexpr
):  # fmt: skip
    """Return a ⊙ b in their own type, or a alone without gates."""
    found = load_tile(a, a_stride, tile, at, start, end, channel, width)
    if GATED:
        other = load_tile(b, b_stride, tile, at, start, end, channel, width)
        found = (found.to(tl.float32) * other.to(tl.float32)).to(found.dtype)
    return found


@triton.jit
def store_tile(x, stride, tile, at, end, channel, width, values):
    here = (tile + at < end)[None, :, :] & (channel < width)[:, None, None]
    place = x + tile.to(tl.int64) * stride + at[None, :, :] * stride + channel[:, None, None]
    tl.store(place, values.to(x.dtype.element_ty), mask=here)


@triton.jit
def _mode_offsets(numbers, channel, width, MODES: tl.constexpr, PARTS: tl.constexpr):
    mode = tl.arange(0, MODES)[None, :]
    if PARTS > 1:
        part = tl.arange(0, channel.shape[0] * PARTS) % PARTS
        mode += part[:, None] * MODES
        apart = tl.broadcast_to(channel[:, None], [channel.shape[0], PARTS])
        channel = tl.reshape(apart, [channel.shape[0] * PARTS])
    return numbers + mode * width + channel[:, None], (channel < width)[:, None]


@triton.jit
def load_modes(numbers, channel, width, MODES: tl.constexpr, PARTS: tl.constexpr):
    """Load [CHANNELS · PARTS, MODES] of a tensor that is stored mode by mode."""
    place, here = _mode_offsets(numbers, channel, width, MODES, PARTS)
    return tl.load(place, mask=here, other=0.0)


@triton.jit
def store_modes(numbers, channel, width, values, MODES: tl.constexpr, PARTS: tl.constexpr):
    place, here = _mode_offsets(numbers, channel, width, MODES, PARTS)
    tl.store(place, values, mask=here)


@triton.jit
def repeat_for_parts(x, PARTS: tl.constexpr):
    """Repeat the tokens of each channel for its parts."""
    if PARTS > 1:
        apart = tl.broadcast_to(x[:, None, :, :], [x.shape[0], PARTS, x.shape[1], x.shape[2]])
        x = tl.reshape(apart, [x.shape[0] * PARTS, x.shape[1], x.shape[2]])
    return x


# Documents


@triton.jit
def document_segments(positions, tile, at, start, end, TURNED: tl.constexpr):
    """Count the document starts in a token's block up to the token, and in each block."""
    here = (tile + at >= start) & (tile + at < end)
    begins = (tl.load(positions + tile + at, mask=here, other=1) == 0).to(tl.int32)
    count = tl.sum(begins, 0)
    segment = tl.cumsum(begins, 0)
    if TURNED:
        segment = count[None, :] - segment + begins
    return segment, count


@triton.jit
def select_segment(x, segment, number, PACKED: tl.constexpr):
    """Keep the values of x in the segments of this number, zero the others."""
    if PACKED:
        x = tl.where((segment == number)[None, :, :], x, 0.0)
    return x


# The filter


@triton.jit
def decay_powers(rate, ages, SPREAD: tl.constexpr):
    """Return λ^age for each age, [CHANNELS, MODES, AGES]; SPREAD swaps the last two axes."""
    if SPREAD:
        exponents = rate[:, None, :] * ages[None, :, None]
    else:
        exponents = rate[:, :, None] * ages[None, None, :]
    return tl.exp(-exponents)


@triton.jit
def load_matrix(taps, channel, width, BLOCK: tl.constexpr):
    """Return [CHANNELS, BLOCK, BLOCK]: the tap from each token of a block to each other."""
    side = tl.arange(0, BLOCK)
    lag = (side[:, None] - side[None, :])[None, :, :]
    channel = channel[:, None, None]
    return tl.load(taps + channel * BLOCK + lag, mask=(lag >= 0) & (channel < width), other=0.0)


@triton.jit
def filter_block(
    matrix, spread, x, states, segment, met, most,
    INPUTS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the filter's outputs: from the tokens of the block, and from the states at its start
    for tokens in the segment `met`."""
    y = tl.zeros([states.shape[0], x.shape[1], x.shape[2]], dtype=tl.float32)
    y = dot_add(y, spread, split_terms(states, tl.float32, 2), 2, 2)
    if PARTS > 1:
        y = tl.sum(tl.reshape(y, [x.shape[0], PARTS, x.shape[1], x.shape[2]]), 1)
    if PACKED:
        y = select_segment(y, segment, met, True)
        for number in range(most + 1):
            part = split_terms(select_segment(x, segment, number, True), x.dtype, INPUTS)
            given = dot_add(tl.zeros(x.shape, dtype=tl.float32), matrix, part, 2, INPUTS)
            y += select_segment(given, segment, number, True)
    else:
        y = dot_add(y, matrix, split_terms(x, x.dtype, INPUTS), 2, INPUTS)
    return y


@triton.jit
def scan_blocks(
    added, decay, unbroken, state,
    CHANNELS: tl.constexpr, MODES: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Return the states at each block's start and at the tile's end, from each block's contribution
    and the `state` at the tile's start; from the end to the start if BACKWARD.

    A tree scan: pairs of blocks are joined upwards, then starting states are handed down.
    """
    decay = decay[:, :, None]
    on = unbroken[None, None, :]
    met = ()
    keeps = ()
    for level in tl.static_range(LEVELS):
        first, second = tl.split(tl.reshape(added, [CHANNELS, MODES, BLOCKS >> (level + 1), 2]))
        keep_first, keep_second = decay, decay
        if PACKED:
            first_on, second_on = tl.split(tl.reshape(on, [1, 1, BLOCKS >> (level + 1), 2]))
            keep_first, keep_second = decay * first_on, decay * second_on
            on = first_on * second_on
        met = met + (second if BACKWARD else first,)
        keeps = keeps + (keep_second if BACKWARD else keep_first,)
        added = first + keep_first * second if BACKWARD else second + keep_second * first
        decay *= decay
    came = state[:, :, None]
    out = tl.reshape(added + decay * came * (on if PACKED else 1.0), [CHANNELS, MODES])
    for level in tl.static_range(LEVELS - 1, -1, -1):
        further = met[level] + keeps[level] * came
        came = tl.join(further, came) if BACKWARD else tl.join(came, further)
        came = tl.reshape(came, [CHANNELS, MODES, BLOCKS >> level])
    return came, out
