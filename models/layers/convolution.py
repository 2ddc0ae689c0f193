"""Causal depthwise convolutions: y_t = Σ_j h[j] · x[t−j], separately for each document.

Filters are in this formula's order: h[0] multiplies the present token. (The papers' correlation
order is the reverse.) A filter has `groups` rows, each shared by contiguous channels. Three forms
give the same result:

    direct     a product and a sum for each tap; short filters
    toeplitz   input chunks times blocks of the filter's Toeplitz matrix; medium filters
    fft        zero-padded to twice the length; filters as long as the row

`history` holds the inputs before the row: the halo under context parallelism, or the previous
inputs in generation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.options.names import Method
from ..config.precision import widen
from ..documents import Documents, plain_layout

DIRECT_TAPS = 16
TOEPLITZ_TAPS = 256
CHUNK = 32


def causal_convolution(
    x: Tensor,
    taps: Tensor,
    documents: Documents | None = None,
    *,
    history: Tensor | None = None,
    method: Method = "auto",
) -> Tensor:
    """Return y like x [rows, length, width], computed in fp32 or wider, for taps [groups, K].
    history [rows, K−1, width] precedes x."""
    dtype = x.dtype
    x, taps = widen(x), widen(taps)
    length, reach = x.shape[1], taps.shape[1]
    if history is not None:
        num_before = reach - 1
        assert history.shape[1] == num_before, "the history is K−1 tokens long"
        history = widen(history)
        if documents is not None:
            documents = documents.prepend_history(num_before)
            history = history * (documents.positions[:, :num_before] >= 0).unsqueeze(-1)
        x = torch.cat([history, x], dim=1)
    form = choose_form(reach, x.shape[1], outputs=length) if method == "auto" else method
    y: Tensor = FORMS[form](x, taps, documents, length)
    return y.to(dtype)


def choose_form(reach: int, length: int, *, outputs: int) -> Method:
    """Choose the form by filter length and number of outputs."""
    if reach <= DIRECT_TAPS or outputs * 4 <= reach:
        return "direct"
    return "toeplitz" if min(reach, length) <= TOEPLITZ_TAPS else "fft"


def convolution_flops(reach: int, length: int, method: Method = "auto") -> float:
    """Return FLOPs per token and channel in the chosen form, without the filter's own transform,
    which is computed once a batch.

    A real transform over n numbers counts 2.5·n·log₂n; there are two with twice the length, and a
    complex product (6) for every second entry.
    """
    form = choose_form(reach, length, outputs=length) if method == "auto" else method
    if form == "direct":
        return 2.0 * reach
    if form == "toeplitz":
        chunk = min(CHUNK, length)
        return 2.0 * chunk * toeplitz_passes(reach, chunk, -(-length // chunk))
    size = 2 * length
    return (2 * 2.5 * size * math.log2(size) + 6 * (size / 2 + 1)) / length


def convolution_chunks(reach: int, length: int, method: Method = "auto") -> set[int]:
    """Return the chunk sizes to which the chosen form aligns packed rows."""
    form = choose_form(reach, length, outputs=length) if method == "auto" else method
    return {min(CHUNK, length)} if form == "toeplitz" else set()


def untraced(reach: int, method: Method, ranks: int) -> str | None:
    """Return the part that torch.compile cannot trace in the chosen form, or None: a packed layout
    that is built within the pass. `ranks` counts the context-parallel ranks."""
    form = choose_form(reach, reach, outputs=reach) if method == "auto" else method
    if form == "fft":
        return "FFTs of packed rows in plain torch"
    if form == "toeplitz" and ranks > 1:
        return "Toeplitz products of packed rows over several ranks in plain torch"
    return None


def direct(x: Tensor, taps: Tensor, documents: Documents | None, outputs: int) -> Tensor:
    """Compute y [rows, length, width] for its last `outputs` tokens, a product and a sum per tap;
    taps [groups, K]."""
    length, width = x.shape[1:]
    num_taps = taps.shape[1]
    filters = taps.repeat_interleave(width // taps.shape[0], dim=0)
    first_output = length - outputs
    padded = F.pad(x, (0, 0, max(num_taps - 1 - first_output, 0), 0))[
        :, -(outputs + num_taps - 1) :
    ]
    if documents is None:
        channels_first = padded.transpose(1, 2)
        return F.conv1d(channels_first, filters.flip(-1).unsqueeze(1), groups=width).transpose(1, 2)
    if outputs < num_taps:
        windows = padded.unfold(1, num_taps, 1)  # [rows, outputs, width, reach], oldest first
        lags = torch.arange(num_taps - 1, -1, -1, device=x.device)
        visible = documents.positions[:, first_output:, None] >= lags
        return torch.einsum("blwk,blk,wk->blw", windows, visible.to(x.dtype), filters.flip(-1))
    positions = documents.positions[:, first_output:, None]
    y = padded[:, num_taps - 1 :] * filters[:, 0]
    for lag in range(1, num_taps):
        shifted = padded[:, num_taps - 1 - lag : padded.shape[1] - lag]
        y = y + torch.where(positions >= lag, shifted, 0) * filters[:, lag]
    return y


def toeplitz(x: Tensor, taps: Tensor, documents: Documents | None, outputs: int) -> Tensor:
    """Chunk n is H₀·Xₙ + H₁·Xₙ₋₁ + …, one term for each chunk that the filter reaches."""
    rows, length = x.shape[:2]
    groups, reach = taps.shape
    chunk = min(CHUNK, length)
    layout = (
        documents.aligned(chunk)
        if documents is not None
        else plain_layout(rows, length, chunk, x.device)
    )
    chunked = layout.spread(x)  # [rows, chunks, chunk, width]
    grouped = chunked.unflatten(-1, (groups, -1)).permute(0, 1, 3, 2, 4)  # rows chunks group time w
    num_passes = toeplitz_passes(reach, chunk, grouped.shape[1])
    column = torch.arange(chunk, device=x.device)
    y = torch.zeros_like(grouped)
    continuous = torch.ones_like(layout.continues)
    for back in range(num_passes):
        if back:
            # Xₙ₋₁ belongs to the document only if no chunk between begins one.
            continuous = (
                continuous & F.pad(layout.continues, (back - 1, 0))[:, : continuous.shape[1]]
            )
            grouped = F.pad(grouped, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
        lag = column[:, None] - column + back * chunk
        in_filter = (lag >= 0) & (lag < reach)
        matrix = taps[:, lag.clamp(0, reach - 1)] * in_filter  # [groups, chunk, chunk]
        y = y + matrix @ (grouped * continuous[:, :, None, None, None])
    return layout.collect(y.permute(0, 1, 3, 2, 4).flatten(3))[:, -outputs:]


def toeplitz_passes(reach: int, chunk: int, chunks: int) -> int:
    """Count the input chunks that an output chunk depends on, including its own."""
    return min(-(-(reach - 1) // chunk), chunks - 1) + 1


def fft(x: Tensor, taps: Tensor, documents: Documents | None, outputs: int) -> Tensor:
    """Convolve x [rows, length, width] by FFT, one document per row; return the last `outputs`
    tokens."""
    if documents is None:
        return fft_rows(x, taps)[:, -outputs:]
    buckets = documents.buckets()
    convolved = [fft_rows(bucket, taps) for bucket in buckets.spread(x)]
    return buckets.collect(convolved, len(x))[:, -outputs:]


def fft_rows(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve single-document rows: x [rows, length, width], taps [groups, K]."""
    length = x.shape[1]
    taps = taps[:, :length]
    size = 2 * length
    spectrum = torch.fft.rfft(taps, n=size)
    spectrum = spectrum.repeat_interleave(x.shape[2] // taps.shape[0], dim=0)
    spectrum_y = torch.fft.rfft(x.transpose(1, 2), n=size) * spectrum
    y: Tensor = torch.fft.irfft(spectrum_y, n=size)
    return y[..., :length].transpose(1, 2)


FORMS = {"direct": direct, "toeplitz": toeplitz, "fft": fft}


def next_history(x: Tensor, history: Tensor | None, reach: int) -> Tensor:
    """Return the last K−1 inputs [rows, K−1, width], for the next call."""
    if history is None:
        history = x.new_zeros(x.shape[0], reach - 1, x.shape[2])
    return torch.cat([history, x], dim=1)[:, x.shape[1] :].detach()
