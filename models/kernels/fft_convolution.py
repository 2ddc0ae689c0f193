"""Long causal filters with their gates, by transforms of whole documents.

    y = q ⊙ (h ∗ w + skip ⊙ w),  w = k ⊙ v            free-form Hyena-LI

The transforms are torch's (cuFFT). What stands around them are two programs: one reads k and v
once and writes w as a transform wants it, in fp32, token beside token, each document by itself with
zeros behind it; the other takes the filtered channels back to rows, with skip and gate. So many
channels are worked at at a time as make NUMBERS numbers: neither the transforms nor what lies
between them grow with the model.

For the backward pass nothing is kept but the inputs. It transforms w and the gradient of y,
multiplies, and transforms back what belongs to w, to the filter, and, once more, y. In bf16 the
programs move 4 + 4·s bytes for each token and channel, and 4 + 8 in and out of the rows; backward
8 + 8·s, and 8 + 16: s, the size of a transform in lengths of the row, is 2 for a filter as long as
the row, and little more than 1 for a short one. Its twin is `plain` in
models/gated_convolution.py, by the method `fft`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .op import op

NUMBERS = 1 << 26
"""That are transformed at a time, about: 256 MiB in fp32."""
SHORTEST = 32
"""Documents of up to so many tokens are transformed alike."""
WAITS = (torch.Tag.cudagraph_unsafe,)
"""For the lengths of documents: CUDA graphs must leave it out."""
TOKENS, CHANNELS = 64, 32
"""A tile: 64 bytes of bf16 on the side of the rows, 256 of fp32 on that of the transforms."""


@cache
def _programs() -> Any:
    from .programs import fft_convolution

    return fft_convolution


def beyond(*, bias: bool, silu: bool, history: bool) -> str | None:
    """What keeps the kernel from such a convolution."""
    if bias or silu:
        return "behind a long filter it has no bias and no SiLU"
    if history:
        return "a long filter takes no inputs from before the row"
    return None


@op("fft_convolution", tags=WAITS)
def fft_convolution(
    x: Tensor, taps: Tensor, skip: Tensor | None, positions: Tensor | None, gated: bool
) -> Tensor:
    """x [rows, length, width or 3·width], taps [groups, K]."""
    x, through = x.contiguous(), x if skip is None else skip.contiguous()
    out = x.new_empty(_shape(x, gated))
    programs = _programs()
    for piece in _pieces(out, taps, positions):
        w = piece.empty(x)
        piece.run(programs.spread, piece.size, x, w, GATED=gated)
        y = piece.back(piece.transformed(w).mul_(piece.spectrum(taps)))
        piece.run(
            programs.collect, piece.longest, y, x, through, out, GATED=gated, SKIP=skip is not None
        )
    return out


@fft_convolution.register_fake
def _(
    x: Tensor, taps: Tensor, skip: Tensor | None, positions: Tensor | None, gated: bool
) -> Tensor:
    return x.new_empty(_shape(x, gated))


@op("fft_convolution_backward", tags=WAITS)
def _backward(
    grad: Tensor,
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, the taps (fp32) and the skip (fp32)."""
    grad, x, through = grad.contiguous(), x.contiguous(), x if skip is None else skip.contiguous()
    width = grad.shape[2]
    grad_x = torch.empty_like(x)
    grad_taps = taps.new_zeros(width, taps.shape[1], dtype=torch.float32)
    grad_skip = taps.new_zeros(0 if skip is None else width, dtype=torch.float32)
    programs = _programs()
    for piece in _pieces(grad, taps, positions):
        w, pulls, partial = piece.empty(x), piece.empty(x), piece.partial(x)
        piece.run(programs.backward_spread, piece.size, grad, x, w, pulls, partial, GATED=gated)
        inputs, pulled = piece.transformed(w), piece.transformed(pulls)
        met = piece.back((inputs.conj() * pulled).sum(0))
        reach = min(piece.longest, taps.shape[1])
        grad_taps[piece.own, :reach] += met[:, :reach]
        spectrum = piece.spectrum(taps)
        y = piece.back(inputs.mul_(spectrum)) if gated else w
        piece.run(
            programs.backward_collect, piece.longest, grad, x, through, y,
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
class Piece:
    """Documents of like lengths, and some of the channels."""

    begins: Tensor
    """int64: the first token of each, among those of all rows."""
    counts: Tensor
    """int64: how many tokens it has."""
    longest: int
    """The most that a document here may have."""
    size: int
    """Of a transform."""
    width: int
    """Of a row."""
    own: slice
    """Which channels."""

    @property
    def channels(self) -> int:
        channels: int = self.own.stop - self.own.start
        return channels

    def empty(self, x: Tensor) -> Tensor:
        shape = (len(self.begins), self.channels, self.size)
        return x.new_empty(shape, dtype=torch.float32)

    def partial(self, x: Tensor) -> Tensor:
        """A sum for each tile of a transform's size."""
        tiles = len(self.begins) * -(-self.size // TOKENS)
        return x.new_empty(tiles, self.channels, dtype=torch.float32)

    def spectrum(self, taps: Tensor) -> Tensor:
        """Of each channel's filter, as far as these documents go."""
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
        """On so many tokens of each document."""
        tiles = -(-tokens // TOKENS)
        program[(len(self.begins) * tiles, -(-self.channels // CHANNELS))](
            self.begins, self.counts, self.own.start, self.width, self.channels, self.size, tiles,
            *tensors, **switches, TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip


def _pieces(y: Tensor, taps: Tensor, positions: Tensor | None) -> Iterator[Piece]:
    """All documents and channels of rows like y."""
    rows, length, width = y.shape
    if not y.numel():
        return
    if positions is None:
        begins, counts = torch.arange(rows) * length, torch.full((rows,), length)
        alike = {length: torch.arange(rows)}
    else:
        starts = positions == 0
        starts[:, 0] = True
        begins = starts.flatten().nonzero().squeeze(1).cpu()
        counts = torch.diff(begins, append=begins.new_tensor([rows * length]))
        power = 2 ** counts.clamp(min=SHORTEST).double().log2().ceil().long()
        alike = {int(longest): (power == longest).nonzero()[:, 0] for longest in power.unique()}
    for longest, those in alike.items():
        where = begins[those].to(y.device), counts[those].to(y.device)
        size = _transform_size(longest + min(longest, taps.shape[1]) - 1)
        step = max(CHANNELS, NUMBERS // (len(those) * size) // CHANNELS * CHANNELS)
        for start in range(0, width, step):
            own = slice(start, min(start + step, width))
            yield Piece(*where, longest, size, width, own)


def _transform_size(least: int) -> int:
    """5, 6, 7 or 8 times a power of two: fast, and few different ones."""
    eighth = max(1 << max((least - 1).bit_length() - 3, 0), 2)
    return -(-least // eighth) * eighth


def _shape(x: Tensor, gated: bool) -> tuple[int, int, int]:
    rows, length, width = x.shape
    return rows, length, width // 3 if gated else width


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.gated = inputs[4]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, taps, skip, _ = ctx.saved_tensors
    grad_x, grad_taps, grad_skip = _backward(grad, *ctx.saved_tensors, ctx.gated)
    of_skip = None if skip is None else grad_skip.to(skip.dtype)
    return grad_x, grad_taps.to(taps.dtype), of_skip, None, None


fft_convolution.register_autograd(_differentiate, setup_context=_keep)
