"""Triton programs of fft_convolution.py: rows to channels, and back.

In rows the channels of a token are adjacent; before and after a transform the tokens of a channel
are, [documents, channels, size] in fp32. A program transposes a tile of a document, TOKENS by
CHANNELS. A launch processes the channels from `start` on, of `width`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(
    begins, counts, start, width, channels, size, tiles,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return a document's first token among those of all rows, the tokens and channels of a tile,
    the tile's offsets in a transform's input, and the masks there and in the rows."""
    document = (tl.program_id(0) // tiles).to(tl.int64)
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    apart = (document * channels + channel) * size + token
    real = (channel < channels) & (token < size)
    inside = (channel < channels) & (token < tl.load(counts + document))
    return tl.load(begins + document) + token, start + channel, apart, real, inside


@triton.jit
def _input(x, token, channel, width, inside, GATED: tl.constexpr):
    """Load w = k ⊙ v, or w."""
    if GATED:
        at = token * (3 * width) + channel
        k = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
        return k * tl.load(x + at + 2 * width, mask=inside, other=0.0).to(tl.float32)
    return tl.load(x + token * width + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def fft_convolution_gather(
    begins, counts, start, width, channels, size, tiles, x, out,
    GATED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write w of each document, padded with zeros."""
    token, channel, apart, real, inside = _tile(
        begins, counts, start, width, channels, size, tiles, TOKENS, CHANNELS
    )
    tl.store(out + apart, _input(x, token, channel, width, inside, GATED), mask=real)


@triton.jit
def fft_convolution_scatter(
    begins, counts, start, width, channels, size, tiles, y, x, skip, out,
    GATED: tl.constexpr, SKIP: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write q ⊙ (y + skip ⊙ w)."""
    token, channel, apart, _, inside = _tile(
        begins, counts, start, width, channels, size, tiles, TOKENS, CHANNELS
    )
    value = tl.load(y + apart, mask=inside, other=0.0)
    if SKIP:
        through = tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
        value += through * _input(x, token, channel, width, inside, GATED)
    if GATED:
        q = tl.load(x + token * (3 * width) + channel, mask=inside, other=0.0)
        value *= q.to(tl.float32)
    tl.store(out + token * width + channel, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pulled(grad, x, token, channel, width, inside, GATED: tl.constexpr):
    """Return the gradient of the filter's output, before the gate q."""
    g = tl.load(grad + token * width + channel, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        q = tl.load(x + token * (3 * width) + channel, mask=inside, other=0.0)
        g *= q.to(tl.float32)
    return g


@triton.jit
def fft_convolution_backward_gather(
    begins, counts, start, width, channels, size, tiles, grad, x, inputs, pulls, grad_skip,
    GATED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write w, the gradient of y, and the sum of their products over the tile."""
    token, channel, apart, real, inside = _tile(
        begins, counts, start, width, channels, size, tiles, TOKENS, CHANNELS
    )
    w = _input(x, token, channel, width, inside, GATED)
    g = _pulled(grad, x, token, channel, width, inside, GATED)
    tl.store(inputs + apart, w, mask=real)
    tl.store(pulls + apart, g, mask=real)
    own = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    to = grad_skip + tl.program_id(0).to(tl.int64) * channels + own
    tl.store(to, tl.sum(w * g, axis=0), mask=own < channels)


@triton.jit
def fft_convolution_backward_scatter(
    begins, counts, start, width, channels, size, tiles, grad, x, skip, y, pulled, grad_x,
    GATED: tl.constexpr, SKIP: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the inputs' gradients from y, the filtered row, and `pulled`, the gradient of w."""
    token, channel, apart, _, inside = _tile(
        begins, counts, start, width, channels, size, tiles, TOKENS, CHANNELS
    )
    of_w = tl.load(pulled + apart, mask=inside, other=0.0)
    through = 0.0
    if SKIP:
        through = tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
        of_w += through * _pulled(grad, x, token, channel, width, inside, GATED)
    kind = grad_x.dtype.element_ty
    if GATED:
        at = token * (3 * width) + channel
        k = tl.load(x + at + width, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at + 2 * width, mask=inside, other=0.0).to(tl.float32)
        between = tl.load(y + apart, mask=inside, other=0.0) + through * (k * v)
        g = tl.load(grad + token * width + channel, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, (g * between).to(kind), mask=inside)
        tl.store(grad_x + at + width, (of_w * v).to(kind), mask=inside)
        tl.store(grad_x + at + 2 * width, (of_w * k).to(kind), mask=inside)
    else:
        tl.store(grad_x + token * width + channel, of_w.to(kind), mask=inside)
