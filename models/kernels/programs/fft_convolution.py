"""Triton programs for fft_convolution.py: rows to channels, and back.

In rows a token's channels are adjacent; before and after a transform a channel's tokens are,
[documents, channels, size] in fp32, or PAIRED [documents, pairs, size, 2]: two channels are the
real and the imaginary part of a transform. A program transposes a document tile, TOKENS by
CHANNELS. A launch processes `num_channels` channels (out of `width`), from `first_channel` on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _document_tile(
    document_begins, document_lengths, first_channel, width, num_channels, transform_size,
    num_tiles, PAIRED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return a document's first token, as an index into all rows' tokens, a tile's tokens and
    channels, its offsets in a transform's input, and the masks there and in the rows."""
    document = (tl.program_id(0) // num_tiles).to(tl.int64)
    token = tl.program_id(0) % num_tiles * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    if PAIRED:
        num_pairs = tl.cdiv(num_channels, 2)
        pair_offsets = (document * num_pairs + channel // 2) * transform_size + token
        transform_offsets = 2 * pair_offsets + channel % 2
        transform_mask = (channel < 2 * num_pairs) & (token < transform_size)
    else:
        transform_offsets = (document * num_channels + channel) * transform_size + token
        transform_mask = (channel < num_channels) & (token < transform_size)
    row_mask = (channel < num_channels) & (token < tl.load(document_lengths + document))
    return (
        tl.load(document_begins + document) + token,
        first_channel + channel,
        transform_offsets,
        transform_mask,
        row_mask,
    )


@triton.jit
def _load_input(x, token, channel, width, mask, GATED: tl.constexpr):
    """Load w = k ⊙ v, or w."""
    if GATED:
        offsets = token * (3 * width) + channel
        k = tl.load(x + offsets + width, mask=mask, other=0.0).to(tl.float32)
        return k * tl.load(x + offsets + 2 * width, mask=mask, other=0.0).to(tl.float32)
    return tl.load(x + token * width + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def fft_convolution_gather(
    document_begins, document_lengths, first_channel, width, num_channels, transform_size,
    num_tiles, x, out,
    GATED: tl.constexpr, PAIRED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out[document, channel, t] = w_t = k_t·v_t, padded with zeros to transform_size."""
    token, channel, transform_offsets, transform_mask, row_mask = _document_tile(
        document_begins, document_lengths, first_channel, width, num_channels, transform_size,
        num_tiles, PAIRED, TOKENS, CHANNELS,
    )  # fmt: skip
    tl.store(
        out + transform_offsets,
        _load_input(x, token, channel, width, row_mask, GATED),
        mask=transform_mask,
    )


@triton.jit
def fft_convolution_scatter(
    document_begins, document_lengths, first_channel, width, num_channels, transform_size,
    num_tiles, y, x, skip, out,
    GATED: tl.constexpr, SKIP: tl.constexpr, PAIRED: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """out = q ⊙ (y + skip ⊙ w), from transforms back into rows."""
    token, channel, transform_offsets, _, row_mask = _document_tile(
        document_begins, document_lengths, first_channel, width, num_channels, transform_size,
        num_tiles, PAIRED, TOKENS, CHANNELS,
    )  # fmt: skip
    value = tl.load(y + transform_offsets, mask=row_mask, other=0.0)
    if SKIP:
        skip_scale = tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
        value += skip_scale * _load_input(x, token, channel, width, row_mask, GATED)
    if GATED:
        q = tl.load(x + token * (3 * width) + channel, mask=row_mask, other=0.0)
        value *= q.to(tl.float32)
    tl.store(out + token * width + channel, value.to(out.dtype.element_ty), mask=row_mask)


@triton.jit
def _load_filter_grad(dy, x, token, channel, width, mask, GATED: tl.constexpr):
    """Return q ⊙ dy, the filter output's gradient."""
    filter_grad = tl.load(dy + token * width + channel, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        q = tl.load(x + token * (3 * width) + channel, mask=mask, other=0.0)
        filter_grad *= q.to(tl.float32)
    return filter_grad


@triton.jit
def fft_convolution_backward_gather(
    document_begins, document_lengths, first_channel, width, num_channels, transform_size,
    num_tiles, dy, x, inputs, filter_grads, grad_skip,
    GATED: tl.constexpr, PAIRED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """w = k ⊙ v, g = q ⊙ dy, and Σ_t w·g over a tile for the skip's gradient."""
    token, channel, transform_offsets, transform_mask, row_mask = _document_tile(
        document_begins, document_lengths, first_channel, width, num_channels, transform_size,
        num_tiles, PAIRED, TOKENS, CHANNELS,
    )  # fmt: skip
    w = _load_input(x, token, channel, width, row_mask, GATED)
    filter_grad = _load_filter_grad(dy, x, token, channel, width, row_mask, GATED)
    tl.store(inputs + transform_offsets, w, mask=transform_mask)
    tl.store(filter_grads + transform_offsets, filter_grad, mask=transform_mask)
    tile_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    skip_ptrs = grad_skip + tl.program_id(0).to(tl.int64) * num_channels + tile_channel
    tl.store(skip_ptrs, tl.sum(w * filter_grad, axis=0), mask=tile_channel < num_channels)


@triton.jit
def fft_convolution_backward_scatter(
    document_begins, document_lengths, first_channel, width, num_channels, transform_size,
    num_tiles, dy, x, skip, y, w_grads, grad_x,
    GATED: tl.constexpr, SKIP: tl.constexpr, PAIRED: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """dq = dy ⊙ (y + skip ⊙ w),  dk = dw ⊙ v,  dv = dw ⊙ k,  dw = w_grads + skip ⊙ q ⊙ dy."""
    token, channel, transform_offsets, _, row_mask = _document_tile(
        document_begins, document_lengths, first_channel, width, num_channels, transform_size,
        num_tiles, PAIRED, TOKENS, CHANNELS,
    )  # fmt: skip
    w_grad = tl.load(w_grads + transform_offsets, mask=row_mask, other=0.0)
    skip_scale = 0.0
    if SKIP:
        skip_scale = tl.load(skip + channel, mask=channel < width, other=0.0).to(tl.float32)
        w_grad += skip_scale * _load_filter_grad(dy, x, token, channel, width, row_mask, GATED)
    dtype = grad_x.dtype.element_ty
    if GATED:
        offsets = token * (3 * width) + channel
        k = tl.load(x + offsets + width, mask=row_mask, other=0.0).to(tl.float32)
        v = tl.load(x + offsets + 2 * width, mask=row_mask, other=0.0).to(tl.float32)
        filtered = tl.load(y + transform_offsets, mask=row_mask, other=0.0) + skip_scale * (k * v)
        dy_t = tl.load(dy + token * width + channel, mask=row_mask, other=0.0).to(tl.float32)
        tl.store(grad_x + offsets, (dy_t * filtered).to(dtype), mask=row_mask)
        tl.store(grad_x + offsets + width, (w_grad * v).to(dtype), mask=row_mask)
        tl.store(grad_x + offsets + 2 * width, (w_grad * k).to(dtype), mask=row_mask)
    else:
        tl.store(grad_x + token * width + channel, w_grad.to(dtype), mask=row_mask)
