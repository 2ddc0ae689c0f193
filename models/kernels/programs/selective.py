"""Shared functions for the selective scan's programs: addresses, and the step Δ."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_channels(num_channels, num_blocks, CHANNELS: tl.constexpr):
    """Return a program's head, its channels, and their mask."""
    head = tl.program_id(1) // num_blocks
    channel = tl.program_id(1) % num_blocks * CHANNELS + tl.arange(0, CHANNELS)
    return head, head * num_channels + channel, channel < num_channels


@triton.jit
def state_offsets(row, chunk, num_chunks, width, channel, MODES: tl.constexpr):
    """Return a chunk's state offsets in [rows, chunks, MODES, width]."""
    mode = tl.arange(0, MODES)[:, None]
    return ((row * num_chunks + chunk) * MODES + mode) * width + channel[None, :]


@triton.jit
def document_start_log_decay(positions, token, length):
    """Return −∞ if a document begins at the token, else 0."""
    position = tl.load(positions + token, mask=token < length, other=1)
    return tl.where(position == 0, float("-inf"), 0.0)


@triton.jit
def load_token_modes(x, token, num_tokens, token_stride, state_size, MODES: tl.constexpr):
    """Load a token's B or C: [MODES]."""
    mode = tl.arange(0, MODES)
    offsets = token * token_stride + mode
    return tl.load(
        x + offsets, mask=(mode < state_size) & (offsets < num_tokens * token_stride), other=0.0
    ).to(tl.float32)


@triton.jit
def softplus(dt, offsets, mask, bias):
    """Return Δ = softplus(dt + bias), 0 outside the row, and its derivative.

    With e = exp(−|v|), softplus(v) = max(v, 0) + log(1 + e), and log(1 + e) = 2·artanh(e/(2 + e)),
    whose series loses no precision where e is small.
    """
    v = tl.load(dt + offsets, mask=mask, other=0.0).to(tl.float32) + bias
    e = tl.exp(-tl.abs(v))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 7.0 + q * (1.0 / 9.0 + q * (1.0 / 11.0 + q * (1.0 / 13.0)))
    series = 1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * series))
    delta = tl.maximum(v, 0.0) + 2.0 * s * series
    slope = tl.where(v >= 0.0, 1.0, e) / (1.0 + e)
    return tl.where(mask, delta, 0.0), slope
