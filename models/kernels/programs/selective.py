"""Shared functions of the selective scan's programs: addresses, and the step Δ."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_channels(channels, blocks, CHANNELS: tl.constexpr):
    """Return the head of a program, its channels, and their mask."""
    head = tl.program_id(1) // blocks
    own = tl.program_id(1) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    return head, head * channels + own, own < channels


@triton.jit
def state_offsets(row, chunk, chunks, width, channel, MODES: tl.constexpr):
    """Return the offsets of a chunk's states in [rows, chunks, MODES, width]."""
    mode = tl.arange(0, MODES)[:, None]
    return ((row * chunks + chunk) * MODES + mode) * width + channel[None, :]


@triton.jit
def document_start_log_decay(positions, token, length):
    """Return −∞ if a document begins at the token, else 0."""
    position = tl.load(positions + token, mask=token < length, other=1)
    return tl.where(position == 0, float("-inf"), 0.0)


@triton.jit
def load_token_modes(x, token, tokens, stride, size, MODES: tl.constexpr):
    """Load B or C of a token: [MODES]."""
    mode = tl.arange(0, MODES)
    at = token * stride + mode
    return tl.load(x + at, mask=(mode < size) & (at < tokens * stride), other=0.0).to(tl.float32)


@triton.jit
def softplus(dt, at, here, bias):
    """Return Δ = softplus(dt + bias), 0 outside the row, and its derivative.

    With e = exp(−|v|), softplus(v) = max(v, 0) + log(1 + e), and log(1 + e) = 2·artanh(e/(2 + e)),
    whose series loses no precision where e is small.
    """
    v = tl.load(dt + at, mask=here, other=0.0).to(tl.float32) + bias
    e = tl.exp(-tl.abs(v))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 7.0 + q * (1.0 / 9.0 + q * (1.0 / 11.0 + q * (1.0 / 13.0)))
    series = 1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * series))
    step = tl.maximum(v, 0.0) + 2.0 * s * series
    slope = tl.where(v >= 0.0, 1.0, e) / (1.0 + e)
    return tl.where(here, step, 0.0), slope
