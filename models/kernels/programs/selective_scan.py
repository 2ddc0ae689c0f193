"""Triton programs of selective_scan.py.

A program is one warp. It holds a block of CHANNELS channels of a head, with all MODES states of
each in registers, and scans a chunk of tokens, UNROLL at a time: loads precede the first use, and
stores follow the last. Sums over channels stay within the warp.

`A` holds A·log₂e, [MODES, width]. At a document's start, −∞ is added to the decay's logarithm.
Tokens outside the row have Δ = 0 and change nothing.
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
    x, dt, bias, A, B, positions, added, spans, length, chunks, channels, heads, size, blocks,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Write each chunk's contribution to the states, from zeros, and the sum of its Δ: ∞ if a
    document begins in it, because then no state passes through."""
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, some = program_channels(channels, blocks, CHANNELS)
    width = channels * heads
    first = chunk * CHUNK
    tokens = tl.minimum(length - first, CHUNK)
    origin = row * length + first
    x += origin * width
    dt += origin * width
    B += (origin * heads + head) * size
    positions += row * length
    real = (tl.arange(0, MODES)[:, None] >= 0) & some[None, :]
    decay = tl.load(A + state_offsets(0, 0, 1, width, channel, MODES), mask=real, other=0.0)
    offset = tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)
    state = tl.zeros([MODES, CHANNELS], dtype=tl.float32)
    span = tl.zeros([CHANNELS], dtype=tl.float32)
    for start in range(0, CHUNK, UNROLL):
        steps = ()
        inputs = ()
        for k in tl.static_range(UNROLL):
            at = (start + k) * width + channel
            here = some & (at < tokens * width)
            step, _ = softplus(dt, at, here, offset)
            steps = steps + (step,)
            inputs = inputs + (tl.load(x + at, mask=here, other=0.0),)
        for k in tl.static_range(UNROLL):
            into = load_token_modes(B, start + k, tokens, heads * size, size, MODES)
            shut = 0.0
            if PACKED:
                shut = document_start_log_decay(positions, first + start + k, length)
            keep = tl.exp2(steps[k][None, :] * decay + shut)
            adds = steps[k] * inputs[k].to(tl.float32)
            state = keep * state + adds[None, :] * into[:, None]
            span += steps[k] - shut
    tl.store(added + state_offsets(row, chunk, chunks, width, channel, MODES), state, mask=real)
    tl.store(spans + (row * chunks + chunk) * width + channel, span, mask=some)


@triton.jit
def selective_scan_scan_states(
    states, spans, A, start, end, width, chunks, numbers,
    START: tl.constexpr, BACKWARD: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the states after the last chunk to `end`; if WRITE, replace each chunk's contribution
    by the states at its start."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < numbers  # MODES · width
    decay = tl.load(A + at, mask=real, other=0.0)
    states += row * chunks * numbers
    spans += row * chunks * width
    everything = (row * 0 + chunks) * numbers  # in 64 bits
    current = tl.zeros([BLOCK], dtype=tl.float32)
    if START:
        current += tl.load(start + row * numbers + at, mask=real, other=0.0)
    for group in range(tl.cdiv(chunks, UNROLL)):
        added = ()
        kept = ()
        for k in tl.static_range(UNROLL):
            chunk = row * 0 + group * UNROLL + k
            if BACKWARD:
                chunk = chunks - 1 - chunk
            place = chunk * numbers + at
            there = real & (place >= 0) & (place < everything)
            adds = tl.load(states + place, mask=there, other=0.0)
            span = tl.load(spans + chunk * width + at % width, mask=there, other=0.0)
            broken = span == float("inf")
            keep = tl.exp2(tl.where(broken, 0.0, span) * decay)
            added = added + (adds,)
            kept = kept + (tl.where(broken, 0.0, keep),)
        for k in tl.static_range(UNROLL):
            chunk = row * 0 + group * UNROLL + k
            if BACKWARD:
                chunk = chunks - 1 - chunk
            place = chunk * numbers + at
            there = real & (place >= 0) & (place < everything)
            if WRITE:
                tl.store(states + place, current, mask=there)
            current = current * kept[k] + added[k]
    tl.store(end + row * numbers + at, current, mask=real)


@triton.jit
def selective_scan_forward(
    x, dt, z, bias, A, B, C, D, positions, states, out, length, chunks, channels, heads, size,
    blocks, z_row, z_token,
    PACKED: tl.constexpr, MODES: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(0)
    head, channel, some = program_channels(channels, blocks, CHANNELS)
    width = channels * heads
    first = chunk * CHUNK
    tokens = tl.minimum(length - first, CHUNK)
    origin = row * length + first
    x += origin * width
    dt += origin * width
    z += row * z_row + first.to(tl.int64) * z_token
    out += origin * width
    B += (origin * heads + head) * size
    C += (origin * heads + head) * size
    positions += row * length
    real = (tl.arange(0, MODES)[:, None] >= 0) & some[None, :]
    own = state_offsets(row, chunk, chunks, width, channel, MODES)
    decay = tl.load(A + state_offsets(0, 0, 1, width, channel, MODES), mask=real, other=0.0)
    state = tl.load(states + own, mask=real, other=0.0)
    offset = tl.load(bias + channel, mask=some, other=0.0).to(tl.float32)
    through = tl.load(D + channel, mask=some, other=0.0).to(tl.float32)
    for start in range(0, CHUNK, UNROLL):
        steps = ()
        inputs = ()
        gates = ()
        for k in tl.static_range(UNROLL):
            at = (start + k) * width + channel
            here = some & (at < tokens * width)
            step, _ = softplus(dt, at, here, offset)
            steps = steps + (step,)
            inputs = inputs + (tl.load(x + at, mask=here, other=0.0),)
            gate = tl.load(z + (start + k) * z_token + channel, mask=here, other=0.0)
            gates = gates + (gate,)
        outputs = ()
        for k in tl.static_range(UNROLL):
            into = load_token_modes(B, start + k, tokens, heads * size, size, MODES)
            outof = load_token_modes(C, start + k, tokens, heads * size, size, MODES)
            shut = 0.0
            if PACKED:
                shut = document_start_log_decay(positions, first + start + k, length)
            value = inputs[k].to(tl.float32)
            keep = tl.exp2(steps[k][None, :] * decay + shut)
            state = keep * state + (steps[k] * value)[None, :] * into[:, None]
            y = tl.sum(outof[:, None] * state, axis=0) + through * value
            gate = gates[k].to(tl.float32)
            outputs = outputs + (y * gate * tl.sigmoid(gate),)
        for k in tl.static_range(UNROLL):
            at = (start + k) * width + channel
            here = some & (at < tokens * width)
            tl.store(out + at, outputs[k].to(out.dtype.element_ty), mask=here)
