"""Next Triton programs for fft_convolution.py: products of the spectra of two channels at once.

Two real channels a and b are one complex transform of a + i·b. Its spectrum Z holds both:

    A_k = (Z_k + conj(Z_{n−k})) / 2,   B_k = (Z_k − conj(Z_{n−k})) / 2i,   Z_k = A_k + i·B_k

A program reads Z at k and n − k, multiplies, and writes both places: BLOCK numbers k ≤ n/2. Complex
numbers are pairs of fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fft_convolution_pair_filters(
    taps, out, first_channel, num_channels, channels_per_group, num_taps, row_length, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the first `num_taps` of taps [groups, row_length] for each channel, then zeros: out
    [pairs, size, 2]."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, pair = number // 2, tl.program_id(1).to(tl.int64)
    channel = 2 * pair + number % 2
    group = (first_channel + channel) // channels_per_group
    mask = (channel < num_channels) & (token < num_taps)
    values = tl.load(taps + group * row_length + token, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + pair * size * 2 + number, values, mask=token < size)


@triton.jit
def _load_spectra(ptrs, k, size, mask):
    """Return A_k and B_k: real and imaginary parts, four vectors."""
    ptrs_k, ptrs_mirror = ptrs + 2 * k, ptrs + 2 * ((size - k) % size)
    real, imaginary = tl.load(ptrs_k, mask=mask), tl.load(ptrs_k + 1, mask=mask)
    mirror_real, mirror_imaginary = (
        tl.load(ptrs_mirror, mask=mask),
        tl.load(ptrs_mirror + 1, mask=mask),
    )
    return (
        0.5 * (real + mirror_real),
        0.5 * (imaginary - mirror_imaginary),
        0.5 * (imaginary + mirror_imaginary),
        0.5 * (mirror_real - real),
    )


@triton.jit
def _store_spectra(ptrs, k, size, mask, a_real, a_imaginary, b_real, b_imaginary):
    """Store Z at k and n − k; if both are one place, A and B are real there."""
    ptrs_k, ptrs_mirror = ptrs + 2 * k, ptrs + 2 * ((size - k) % size)
    tl.store(ptrs_k, a_real - b_imaginary, mask=mask)
    tl.store(ptrs_k + 1, a_imaginary + b_real, mask=mask)
    tl.store(ptrs_mirror, a_real + b_imaginary, mask=mask)
    tl.store(ptrs_mirror + 1, b_real - a_imaginary, mask=mask)


@triton.jit
def fft_convolution_multiply(spectra, filters, size, num_pairs, BLOCK: tl.constexpr):
    """W ← W·H for each document: spectra [documents, pairs, size], filters [pairs, size]."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = k <= size // 2
    pair, document = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    ptrs = spectra + (document * num_pairs + pair) * size * 2
    a_real, a_imaginary, b_real, b_imaginary = _load_spectra(ptrs, k, size, mask)
    ha_real, ha_imaginary, hb_real, hb_imaginary = _load_spectra(
        filters + pair * size * 2, k, size, mask
    )
    _store_spectra(
        ptrs, k, size, mask, a_real * ha_real - a_imaginary * ha_imaginary,
        a_real * ha_imaginary + a_imaginary * ha_real,
        b_real * hb_real - b_imaginary * hb_imaginary,
        b_real * hb_imaginary + b_imaginary * hb_real,
    )  # fmt: skip


@triton.jit
def fft_convolution_backward_multiply(
    spectra, grads, filters, correlations, size, num_pairs, num_documents, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """C = Σ conj(W)·G over documents, G ← G·conj(H) and, for OUTPUTS, W ← W·H."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = k <= size // 2
    pair = tl.program_id(1).to(tl.int64)
    ha_real, ha_imaginary, hb_real, hb_imaginary = _load_spectra(
        filters + pair * size * 2, k, size, mask
    )
    zeros = tl.zeros([BLOCK], dtype=tl.float32)
    ca_real, ca_imaginary, cb_real, cb_imaginary = zeros, zeros, zeros, zeros
    for document in range(num_documents):
        offset = (pair + document * num_pairs) * size * 2
        wa_real, wa_imaginary, wb_real, wb_imaginary = _load_spectra(
            spectra + offset, k, size, mask
        )
        ga_real, ga_imaginary, gb_real, gb_imaginary = _load_spectra(grads + offset, k, size, mask)
        ca_real += wa_real * ga_real + wa_imaginary * ga_imaginary
        ca_imaginary += wa_real * ga_imaginary - wa_imaginary * ga_real
        cb_real += wb_real * gb_real + wb_imaginary * gb_imaginary
        cb_imaginary += wb_real * gb_imaginary - wb_imaginary * gb_real
        if OUTPUTS:
            _store_spectra(
                spectra + offset, k, size, mask, wa_real * ha_real - wa_imaginary * ha_imaginary,
                wa_real * ha_imaginary + wa_imaginary * ha_real,
                wb_real * hb_real - wb_imaginary * hb_imaginary,
                wb_real * hb_imaginary + wb_imaginary * hb_real,
            )  # fmt: skip
        _store_spectra(
            grads + offset, k, size, mask, ga_real * ha_real + ga_imaginary * ha_imaginary,
            ga_imaginary * ha_real - ga_real * ha_imaginary,
            gb_real * hb_real + gb_imaginary * hb_imaginary,
            gb_imaginary * hb_real - gb_real * hb_imaginary,
        )  # fmt: skip
    _store_spectra(
        correlations + pair * size * 2, k, size, mask, ca_real, ca_imaginary, cb_real, cb_imaginary
    )
