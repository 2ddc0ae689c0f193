"""Gated long causal filters: Fourier transforms over whole documents.

    y = q ⊙ (h ∗ w + skip ⊙ w),  w = k ⊙ v            free-form Hyena-LI

torch (cuFFT) computes the transforms. A program before them reads k and v once and writes w in fp32
[documents, channels, size]: the tokens of a document and channel are adjacent, padded with zeros. A
program after them writes the filtered channels back into rows, with skip and gate. A launch takes a
range of channels, so transforms and intermediate tensors have about MAX_NUMBERS numbers however
wide the model is. cuFFT makes a plan for each number of transforms: packed rows round it up, by
less than a quarter, so that few plans are made.

The backward pass keeps nothing but the inputs. It transforms w and the gradient of the filter's
output, multiplies their spectra, and transforms the gradients of w and of the filter back, and y
once more.

Bytes that the programs move for each token and channel in bf16, where s is the size of a transform
divided by the length of the row: 2 for a filter as long as the row, little more than 1 for a short
one.

                        rows                        transforms
    forward, before      4  k v                     4·s  w
    forward, after       8  q k v, result           4    y
    backward, before     8  q k v dy                8·s  w, gradient of the filter's output
    backward, after     14  q k v dy, dq dk dv      8    y, gradient of w

Next programs (`PairedBatch`) transform two channels at once.

The twin is `plain` in models/layers/gated_convolution.py, by the method `fft`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..documents import copy_async
from . import choice
from .launch import Programs
from .op import op

MAX_NUMBERS = 1 << 26
"""Numbers in a batch of transforms, about: 256 MiB in fp32."""
MIN_TRANSFORM_TOKENS = 32
"""Shorter documents are transformed at the size of documents with this length."""
DYNAMIC_TAGS = (torch.Tag.cudagraph_unsafe,)
"""The number of launches depends on the documents, so CUDA graphs must leave the op out."""
TOKENS, CHANNELS = 64, 32
"""Tile size: 64 bytes in bf16 rows, 256 bytes in fp32 transforms."""
PRODUCT_BLOCK = 512
"""Numbers of a spectrum per program that multiplies spectra."""


@cache
def _programs() -> Any:
    from .programs import fft_convolution

    return Programs(fft_convolution)


@cache
def _next_programs() -> Any:
    from .programs import fft_convolution_next

    return Programs(fft_convolution_next)


def unsupported_reason(*, bias: bool, silu: bool, history: bool) -> str | None:
    """Return why the kernel cannot compute this convolution, or None."""
    if bias or silu:
        return "it has no bias and no SiLU after a long filter"
    if history:
        return "it takes no inputs from before the row for a long filter"
    return None


@op("fft_convolution", tags=DYNAMIC_TAGS)
def fft_convolution(
    x: Tensor, taps: Tensor, skip: Tensor | None, positions: Tensor | None, gated: bool
) -> Tensor:
    """Return y [rows, length, width].

    x [rows, length, width] is w; if `gated`, x [rows, length, 3·width] is q, k and v. taps
    [groups, K], skip [width]. Packed rows have positions [rows, length], best in host memory: the
    host computes the sizes of the transforms, and waits for positions on the device.
    """
    x, skip_or_placeholder = x.contiguous(), x if skip is None else skip.contiguous()
    out = x.new_empty(_output_shape(x, gated))
    programs = _programs()
    for transforms in _plan_transforms(out, taps, positions):
        w = transforms.empty_input(x)
        transforms.launch(programs.fft_convolution_gather, transforms.size, x, w, GATED=gated)
        y = transforms.convolve(w, taps)
        transforms.launch(
            programs.fft_convolution_scatter, transforms.max_length, y, x, skip_or_placeholder, out,
            GATED=gated, SKIP=skip is not None,
        )  # fmt: skip
    return out


@fft_convolution.register_fake
def _(
    x: Tensor, taps: Tensor, skip: Tensor | None, positions: Tensor | None, gated: bool
) -> Tensor:
    return x.new_empty(_output_shape(x, gated))


@op("fft_convolution_backward", tags=DYNAMIC_TAGS)
def _backward(
    dy: Tensor,
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, taps (fp32 [groups, K]) and skip (fp32 [width])."""
    dy, x = dy.contiguous(), x.contiguous()
    skip_or_placeholder = x if skip is None else skip.contiguous()
    width = dy.shape[2]
    grad_x = torch.empty_like(x)
    grad_taps = taps.new_zeros(width, taps.shape[1], dtype=torch.float32)
    grad_skip = taps.new_zeros(0 if skip is None else width, dtype=torch.float32)
    programs = _programs()
    for transforms in _plan_transforms(dy, taps, positions):
        w, grad_filtered = transforms.empty_input(x), transforms.empty_input(x)
        tile_skip_grads = transforms.empty_tile_sums(x)
        transforms.launch(
            programs.fft_convolution_backward_gather, transforms.size, dy, x, w, grad_filtered,
            tile_skip_grads, GATED=gated,
        )  # fmt: skip
        correlations, y, w_grads = transforms.convolve_backward(w, grad_filtered, taps, gated)
        num_taps = min(transforms.max_length, taps.shape[1])
        grad_taps[transforms.channel_range, :num_taps] += correlations[:, :num_taps]
        transforms.launch(
            programs.fft_convolution_backward_scatter, transforms.max_length, dy, x,
            skip_or_placeholder, y, w_grads, grad_x, GATED=gated, SKIP=skip is not None,
        )  # fmt: skip
        if skip is not None:
            grad_skip[transforms.channel_range] += tile_skip_grads.sum(0)
    return grad_x, grad_taps.unflatten(0, (len(taps), -1)).sum(1), grad_skip


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        taps.new_empty(taps.shape, dtype=torch.float32),
        taps.new_empty(0 if skip is None else grad.shape[2], dtype=torch.float32),
    )


@dataclass(frozen=True)
class TransformBatch:
    """Transforms of one size: documents of similar lengths, in a range of the channels."""

    document_begins: Tensor
    """int64: each document's first token, as an index into all rows' tokens."""
    document_lengths: Tensor
    """int64: tokens per document."""
    num_transforms: int
    """Transforms per channel. Those after one per document are not used."""
    max_length: int
    """Upper bound on a document's tokens."""
    size: int
    """Numbers per transform."""
    width: int
    """Channels per row."""
    channel_range: slice
    """Channels of the batch."""

    paired: ClassVar[bool] = False
    """Two channels are one complex transform."""

    @property
    def channels(self) -> int:
        channels: int = self.channel_range.stop - self.channel_range.start
        return channels

    def empty_input(self, x: Tensor) -> Tensor:
        """Allocate transform inputs, fp32 [num_transforms, channels, size]."""
        return x.new_empty(self.num_transforms, self.channels, self.size, dtype=torch.float32)

    def empty_tile_sums(self, x: Tensor) -> Tensor:
        """Allocate one sum per tile and channel: [tiles, channels]."""
        tiles = len(self.document_begins) * -(-self.size // TOKENS)
        return x.new_empty(tiles, self.channels, dtype=torch.float32)

    def convolve(self, w: Tensor, taps: Tensor) -> Tensor:
        """Return h ∗ w in the layout of w."""
        return self.invert(self.transform(w).mul_(self.transform(self.channel_taps(taps))))

    def convolve_backward(
        self, w: Tensor, grad: Tensor, taps: Tensor, gated: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of each channel's taps [channels, ≥ taps]; h ∗ w, which only gates
        need; and the gradient of w."""
        w_spectrum, grad_spectrum = self.transform(w), self.transform(grad)
        # Tap n's gradient correlates w with the gradient n tokens later, summed over documents.
        used = slice(len(self.document_begins))
        correlations = self.invert((w_spectrum[used].conj() * grad_spectrum[used]).sum(0))
        spectrum = self.transform(self.channel_taps(taps))
        y = self.invert(w_spectrum.mul_(spectrum)) if gated else w
        return correlations, y, self.invert(grad_spectrum.mul_(spectrum.conj()))

    def channel_taps(self, taps: Tensor) -> Tensor:
        """Return each channel's filter, fp32 [channels, ≤ K], from taps [groups, K]. Taps beyond
        the longest document are cut off."""
        group = torch.arange(self.channel_range.start, self.channel_range.stop, device=taps.device)
        group //= self.width // len(taps)
        return taps[group, : self.max_length].float()

    def transform(self, x: Tensor) -> Tensor:
        """Return the spectrum [..., size / 2 + 1] of x [..., ≤ size]."""
        spectrum: Tensor = torch.fft.rfft(x, n=self.size)
        return spectrum

    def invert(self, x: Tensor) -> Tensor:
        """Return the inverse transform [..., size] of x [..., size / 2 + 1]."""
        y: Tensor = torch.fft.irfft(x, n=self.size)
        return y

    def launch(self, program: Any, tokens: int, *tensors: Tensor, **constants: bool) -> None:
        """Launch a program on the first `tokens` of every document."""
        tiles = -(-tokens // TOKENS)
        program[(len(self.document_begins) * tiles, -(-self.channels // CHANNELS))](
            self.document_begins, self.document_lengths, self.channel_range.start, self.width,
            self.channels, self.size, tiles, *tensors, **constants, PAIRED=self.paired,
            TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True)
class PairedBatch(TransformBatch):
    """Transforms of two channels at once, for `kernels.fft_convolution: next`: a complex transform
    has no pass that splits or joins halves, its inverse keeps its input, and one program computes
    all products of spectra. Tensors are [num_transforms, pairs, size, 2] in fp32."""

    paired: ClassVar[bool] = True

    @property
    def pairs(self) -> int:
        return -(-self.channels // 2)

    def empty_input(self, x: Tensor) -> Tensor:
        shape = self.num_transforms, self.pairs, self.size, 2
        return x.new_empty(shape, dtype=torch.float32)

    def transform(self, x: Tensor) -> Tensor:
        """Return the spectra of x [..., ≤ size, 2], like x."""
        return torch.view_as_real(torch.fft.fft(torch.view_as_complex(x), n=self.size))

    def invert(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.ifft(torch.view_as_complex(x)))

    def convolve(self, w: Tensor, taps: Tensor) -> Tensor:
        spectra, filters = self.transform(w), self.filter_spectra(taps)
        grid = *self.product_grid, len(self.document_begins)
        _next_programs().fft_convolution_multiply[grid](
            spectra, filters, self.size, self.pairs, BLOCK=PRODUCT_BLOCK, num_warps=4
        )
        return self.invert(spectra)

    def convolve_backward(
        self, w: Tensor, grad: Tensor, taps: Tensor, gated: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        spectra, grads, filters = self.transform(w), self.transform(grad), self.filter_spectra(taps)
        correlations = torch.empty_like(filters)
        _next_programs().fft_convolution_backward_multiply[self.product_grid](
            spectra, grads, filters, correlations, self.size, self.pairs,
            len(self.document_begins), OUTPUTS=gated, BLOCK=PRODUCT_BLOCK, num_warps=4,
        )  # fmt: skip
        num_taps = min(self.max_length, taps.shape[1])
        by_channel = self.invert(correlations)[:, :num_taps].transpose(1, 2).flatten(0, 1)
        return by_channel[: self.channels], self.invert(spectra) if gated else w, self.invert(grads)

    def filter_spectra(self, taps: Tensor) -> Tensor:
        """Return the filters' spectra [pairs, size, 2]."""
        w = taps.new_empty(self.pairs, self.size, 2, dtype=torch.float32)
        _next_programs().fft_convolution_pair_filters[
            (-(-2 * self.size // PRODUCT_BLOCK), self.pairs)
        ](
            taps.contiguous(), w, self.channel_range.start, self.channels, self.width // len(taps),
            min(self.max_length, taps.shape[1]), taps.shape[1], self.size, BLOCK=PRODUCT_BLOCK,
            num_warps=4,
        )  # fmt: skip
        return self.transform(w)

    @property
    def product_grid(self) -> tuple[int, int]:
        return -(-(self.size // 2 + 1) // PRODUCT_BLOCK), self.pairs


def _plan_transforms(y: Tensor, taps: Tensor, positions: Tensor | None) -> Iterator[TransformBatch]:
    """Yield batches that cover all documents and channels of y [rows, length, width]."""
    batch_type = PairedBatch if "fft_convolution" in choice.NEXT else TransformBatch
    rows, length, width = y.shape
    if not y.numel():
        return
    if positions is None:
        begins, lengths = torch.arange(rows) * length, torch.full((rows,), length)
        max_lengths = lengths
    else:
        starts = positions.cpu() == 0
        starts[:, 0] = True
        begins = starts.flatten().nonzero().squeeze(1)
        lengths = torch.diff(begins, append=begins.new_tensor([rows * length]))
        max_lengths = 2 ** lengths.clamp(min=MIN_TRANSFORM_TOKENS).double().log2().ceil().long()
    for max_length in max_lengths.unique().tolist():
        selected = max_lengths == max_length
        num_transforms = int(selected.sum())
        if positions is not None:
            num_transforms = _round_up(num_transforms, multiple=1)
        size = _round_up(max_length + min(max_length, taps.shape[1]) - 1, multiple=2)
        max_channels = MAX_NUMBERS // (num_transforms * size)
        channels_per_batch = max(CHANNELS, max_channels // CHANNELS * CHANNELS)
        document_begins = copy_async(begins[selected], y.device)
        document_lengths = copy_async(lengths[selected], y.device)
        for start in range(0, width, channels_per_batch):
            yield batch_type(
                document_begins,
                document_lengths,
                num_transforms,
                max_length,
                size,
                width,
                channel_range=slice(start, min(start + channels_per_batch, width)),
            )


def _round_up(number: int, multiple: int) -> int:
    """Round up to 5, 6, 7 or 8 times a power of two, and to a multiple of `multiple`: transforms of
    these sizes are fast, and there are few of them."""
    step = max(1 << max((number - 1).bit_length() - 3, 0), multiple)
    return -(-number // step) * step


def _output_shape(x: Tensor, gated: bool) -> tuple[int, int, int]:
    rows, length, width = x.shape
    return rows, length, width // 3 if gated else width


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.gated = inputs[4]


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    _, taps, skip, _ = saved
    grad_x, grad_taps, grad_skip = _backward(dy, *saved, ctx.gated)
    typed_skip_grad = None if skip is None else grad_skip.to(skip.dtype)
    return grad_x, grad_taps.to(taps.dtype), typed_skip_grad, None, None


fft_convolution.register_autograd(_autograd_backward, setup_context=_setup_context)
