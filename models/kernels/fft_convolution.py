"""Long causal filters with their gates, by Fourier transforms of whole documents.

    y = q ⊙ (h ∗ w + skip ⊙ w),  w = k ⊙ v            free-form Hyena-LI

The transforms are torch's (cuFFT). Two programs surround them: one reads k and v once and writes w
in the order of a transform, in fp32, tokens adjacent, each document by itself and padded with
zeros; the other writes the filtered channels back into rows, with skip and gate. Channels are
processed in pieces of about NUMBERS numbers, so neither the transforms nor the intermediate
tensors grow with the model. A batch of transforms has up to a quarter more places than documents:
cuFFT plans, which depend on its size, take few values.

The backward pass keeps nothing but the inputs. It transforms w and the gradient of y, multiplies,
and transforms back the gradients of w and of the filter, and y once more. In bf16 the programs
move 4 + 4·s bytes for each token and channel, and 4 + 8 in and out of the rows; backward 8 + 8·s,
and 8 + 16. Here s, the size of a transform in lengths of the row, is 2 for a filter as long as the
row, and little more than 1 for a short one. The twin is `plain` in
models/layers/gated_convolution.py, by the method `fft`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..documents import moved
from .op import op

NUMBERS = 1 << 26
"""Approximate numbers that are transformed at a time: 256 MiB in fp32."""
SHORTEST = 32
"""Tokens up to which all documents have one transform size."""
VARIES = (torch.Tag.cudagraph_unsafe,)
"""The launches of the op follow the documents, so CUDA graphs must leave it out."""
TOKENS, CHANNELS = 64, 32
"""Size of a tile: 64 bytes of bf16 in the rows, 256 bytes of fp32 in the transforms."""


@cache
def _programs() -> Any:
    from .programs import fft_convolution

    return fft_convolution


def unsupported_reason(*, bias: bool, silu: bool, history: bool) -> str | None:
    """Return why the kernel cannot compute this convolution, or None."""
    if bias or silu:
        return "it has no bias and no SiLU after a long filter"
    if history:
        return "it takes no inputs from before the row for a long filter"
    return None


@op("fft_convolution", tags=VARIES)
def fft_convolution(
    x: Tensor, taps: Tensor, skip: Tensor | None, positions: Tensor | None, gated: bool
) -> Tensor:
    """Filter x [rows, length, width or 3·width] with taps [groups, K].

    The positions are best in host memory, where the sizes of the transforms are computed: on the
    device, the host waits for them.
    """
    x, through = x.contiguous(), x if skip is None else skip.contiguous()
    out = x.new_empty(_shape(x, gated))
    programs = _programs()
    for piece in _pieces(out, taps, positions):
        w = piece.empty(x)
        piece.run(programs.fft_convolution_gather, piece.size, x, w, GATED=gated)
        y = piece.back(piece.transformed(w).mul_(piece.spectrum(taps)))
        piece.run(
            programs.fft_convolution_scatter, piece.longest, y, x, through, out, GATED=gated,
            SKIP=skip is not None,
        )  # fmt: skip
    return out


@fft_convolution.register_fake
def _(
    x: Tensor, taps: Tensor, skip: Tensor | None, positions: Tensor | None, gated: bool
) -> Tensor:
    return x.new_empty(_shape(x, gated))


@op("fft_convolution_backward", tags=VARIES)
def _backward(
    grad: Tensor,
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, the taps (fp32) and the skip (fp32)."""
    grad, x, through = grad.contiguous(), x.contiguous(), x if skip is None else skip.contiguous()
    width = grad.shape[2]
    grad_x = torch.empty_like(x)
    grad_taps = taps.new_zeros(width, taps.shape[1], dtype=torch.float32)
    grad_skip = taps.new_zeros(0 if skip is None else width, dtype=torch.float32)
    programs = _programs()
    for piece in _pieces(grad, taps, positions):
        w, pulls, partial = piece.empty(x), piece.empty(x), piece.partial(x)
        piece.run(
            programs.fft_convolution_backward_gather, piece.size, grad, x, w, pulls, partial,
            GATED=gated,
        )  # fmt: skip
        inputs, pulled = piece.transformed(w), piece.transformed(pulls)
        used = slice(len(piece.begins))
        met = piece.back((inputs[used].conj() * pulled[used]).sum(0))
        reach = min(piece.longest, taps.shape[1])
        grad_taps[piece.own, :reach] += met[:, :reach]
        spectrum = piece.spectrum(taps)
        y = piece.back(inputs.mul_(spectrum)) if gated else w
        piece.run(
            programs.fft_convolution_backward_scatter, piece.longest, grad, x, through, y,
            piece.back(pulled.mul_(spectrum.conj())), grad_x, GATED=gated, SKIP=skip is not None,
        )  # fmt: skip
        if skip is not None:
            grad_skip[piece.own] += partial.sum(0)
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
    """Documents of similar lengths, and a range of the channels."""

    begins: Tensor
    """int64: index of the first token of each document, among the tokens of all rows."""
    counts: Tensor
    """int64: tokens of each document."""
    places: int
    """Transforms of a channel: at least as many as documents. The others are not used."""
    longest: int
    """Upper bound of the tokens of a document."""
    size: int
    """Numbers of a transform."""
    width: int
    """Channels of a row."""
    own: slice
    """Range of the channels."""

    @property
    def channels(self) -> int:
        channels: int = self.own.stop - self.own.start
        return channels

    def empty(self, x: Tensor) -> Tensor:
        return x.new_empty(self.places, self.channels, self.size, dtype=torch.float32)

    def partial(self, x: Tensor) -> Tensor:
        """Return room for one sum for each tile of a transform."""
        tiles = len(self.begins) * -(-self.size // TOKENS)
        return x.new_empty(tiles, self.channels, dtype=torch.float32)

    def spectrum(self, taps: Tensor) -> Tensor:
        """Return the transform of each channel's filter, cut to the longest document."""
        group = torch.arange(self.own.start, self.own.stop, device=taps.device)
        group //= self.width // len(taps)
        return self.transformed(taps[group, : self.longest].float())

    def transformed(self, x: Tensor) -> Tensor:
        spectrum: Tensor = torch.fft.rfft(x, n=self.size)
        return spectrum

    def back(self, x: Tensor) -> Tensor:
        y: Tensor = torch.fft.irfft(x, n=self.size)
        return y

    def run(self, program: Any, tokens: int, *tensors: Tensor, **switches: bool) -> None:
        """Launch a program on the first `tokens` of each document."""
        tiles = -(-tokens // TOKENS)
        program[(len(self.begins) * tiles, -(-self.channels // CHANNELS))](
            self.begins, self.counts, self.own.start, self.width, self.channels, self.size, tiles,
            *tensors, **switches, TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip


def _pieces(y: Tensor, taps: Tensor, positions: Tensor | None) -> Iterator[TransformBatch]:
    """Yield pieces that cover all documents and channels of rows shaped like y."""
    rows, length, width = y.shape
    if not y.numel():
        return
    if positions is None:
        begins, counts = torch.arange(rows) * length, torch.full((rows,), length)
        alike = {length: torch.arange(rows)}
    else:
        starts = positions.cpu() == 0
        starts[:, 0] = True
        begins = starts.flatten().nonzero().squeeze(1)
        counts = torch.diff(begins, append=begins.new_tensor([rows * length]))
        power = 2 ** counts.clamp(min=SHORTEST).double().log2().ceil().long()
        alike = {int(longest): (power == longest).nonzero()[:, 0] for longest in power.unique()}
    for longest, those in alike.items():
        where = moved(begins[those], y.device), moved(counts[those], y.device)
        size = _rounded(longest + min(longest, taps.shape[1]) - 1, 2)
        places = len(those) if positions is None else _rounded(len(those), 1)
        step = max(CHANNELS, NUMBERS // (places * size) // CHANNELS * CHANNELS)
        for start in range(0, width, step):
            own = slice(start, min(start + step, width))
            yield TransformBatch(*where, places, longest, size, width, own)


def _rounded(least: int, step: int) -> int:
    """Return 5, 6, 7 or 8 times a power of two (a multiple of `step` below): fast sizes of
    transforms, and few different ones."""
    eighth = max(1 << max((least - 1).bit_length() - 3, 0), step)
    return -(-least // eighth) * eighth


def _shape(x: Tensor, gated: bool) -> tuple[int, int, int]:
    rows, length, width = x.shape
    return rows, length, width // 3 if gated else width


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.gated = inputs[4]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    _, taps, skip, _ = saved
    grad_x, grad_taps, grad_skip = _backward(grad, *saved, ctx.gated)
    of_skip = None if skip is None else grad_skip.to(skip.dtype)
    return grad_x, grad_taps.to(taps.dtype), of_skip, None, None


fft_convolution.register_autograd(_differentiate, setup_context=_keep)
