"""A causal convolution and the gates around it, by the fused kernel for its filter length.

    y = q ⊙ act(h ∗ w + bias + skip ⊙ w),  w = k ⊙ v

x holds q, k and v, concatenated; without gates, x is w.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config.options.names import Kernel, Method
from ..config.precision import widen
from ..documents import Documents
from ..kernels import fft_convolution, modal, short_convolution, toeplitz
from ..kernels.choice import uses_kernel
from ..parallel.axes import ALONE, Axis
from .convolution import causal_convolution
from .scan import modal_few, modal_scan


def gated_convolution(
    x: Tensor,
    taps: Tensor,
    documents: Documents | None = None,
    *,
    gated: bool = False,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    silu: bool = False,
    history: Tensor | None = None,
    method: Method = "auto",
    kernel: Kernel = "auto",
) -> Tensor:
    """x [rows, length, width or 3·width], taps [groups, K] → [rows, length, width].

    `history` [rows, K−1, width] is w before the row. Plain torch alone uses `method`.
    """
    positions = documents.positions if documents is not None else None
    fused: Tensor
    if taps.shape[1] <= short_convolution.MAX_TAPS:
        problem = short_convolution.unsupported_reason(taps)
        if uses_kernel(kernel, "short_convolution", x, problem):
            fused = short_convolution.short_convolution(
                x, taps, bias, skip, history, positions, gated, silu
            )
            return fused
    elif taps.shape[1] <= toeplitz.MAX_TAPS:
        problem = toeplitz.unsupported_reason(taps, bias=bias is not None, silu=silu)
        if uses_kernel(kernel, "toeplitz", x, problem):
            fused = toeplitz.toeplitz(x, taps, skip, history, positions, gated)
            return fused
    else:
        problem = fft_convolution.unsupported_reason(
            bias=bias is not None, silu=silu, history=history is not None
        )
        if uses_kernel(kernel, "fft_convolution", x, problem):
            on_host = (documents.host or documents).positions if documents is not None else None
            fused = fft_convolution.fft_convolution(x, taps, skip, on_host, gated)
            return fused
    return plain(
        x,
        taps,
        documents,
        gated=gated,
        bias=bias,
        skip=skip,
        silu=silu,
        history=history,
        method=method,
    )


def plain(
    x: Tensor,
    taps: Tensor,
    documents: Documents | None = None,
    *,
    gated: bool = False,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    silu: bool = False,
    history: Tensor | None = None,
    method: Method = "auto",
) -> Tensor:
    """Reference implementation of the kernels in torch."""
    w = gated_input(x) if gated else x
    y = causal_convolution(w, taps, documents, history=history, method=method)
    if bias is not None:
        y = y + bias
    if skip is not None:
        y = y + skip * w
    if silu:
        y = F.silu(y)
    return x[..., : w.shape[-1]] * y.to(x.dtype) if gated else y


def gated_modal(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    documents: Documents | None = None,
    *,
    state: Tensor | None = None,
    axis: Axis = ALONE,
    final_state: bool = False,
    gated: bool = True,
    chunk: int = 32,
    kernel: Kernel = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`gated_convolution` with the filter Σ_n residues_n · exp(−rates_n · t), as a scan; and its
    last state.

    rates and residues [width, N], state [rows, width, N]. `axis` is the context-parallel axis.
    Plain torch alone uses `chunk`.
    """
    problem = modal.unsupported_reason(rates, x.shape[1], axis.name)
    if uses_kernel(kernel, "modal", x, problem):
        fused, end = _fused_modal(x, rates, residues, skip, documents, state, axis, gated)
        return fused, end if final_state else None
    w = gated_input(x) if gated else x
    y, last = modal_scan(
        widen(w),
        rates,
        residues,
        documents,
        state=state,
        axis=axis,
        final_state=final_state,
        chunk=chunk,
    )
    return _finished(x, w, y, skip, gated), last


def _fused_modal(
    x: Tensor,
    rates: Tensor,
    residues: Tensor,
    skip: Tensor | None,
    documents: Documents | None,
    state: Tensor | None,
    axis: Axis,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    """The kernel takes whole blocks; the remaining tokens are computed all with all."""
    whole = x.shape[1] // modal.BLOCK * modal.BLOCK
    positions = documents.positions if documents is not None else None
    blocks, rest = (None, None) if positions is None else positions.tensor_split([whole], 1)
    pieces = []
    if whole:
        y, state, _ = modal.modal(
            x[:, :whole], rates, residues, skip, state, blocks, gated, axis.name
        )
        pieces.append(y)
    if whole < x.shape[1]:
        few = x[:, whole:]
        w = gated_input(few) if gated else few
        y, state = modal_few(widen(w), rates, residues, rest, state=state)
        pieces.append(_finished(few, w, y, skip, gated))
    assert state is not None
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)  # cat would copy
    return y, state


def _finished(x: Tensor, w: Tensor, y: Tensor, skip: Tensor | None, gated: bool) -> Tensor:
    y = y.to(x.dtype)
    if skip is not None:
        y = y + skip * w
    return x[..., : w.shape[-1]] * y if gated else y


def gated_input(x: Tensor) -> Tensor:
    """Return k ⊙ v."""
    _, k, v = x.chunk(3, dim=-1)
    return k * v
