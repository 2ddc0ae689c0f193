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
    """Return y [rows, length, width] for x [rows, length, width], or [rows, length, 3·width] if
    `gated`: q, k and v.

    taps [groups, K], bias and skip [width]; history [rows, K−1, width] is w before the row. Only
    plain torch reads `method`.
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
            host_positions = (
                (documents.host or documents).positions if documents is not None else None
            )
            fused = fft_convolution.fft_convolution(x, taps, skip, host_positions, gated)
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
    """Torch twin of the kernels; shapes as in `gated_convolution`."""
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
    """Return `gated_convolution` with the filter Σ_n residues_n · exp(−rates_n · t), as a scan
    [rows, length, width]; and the final state [rows, width, N].

    rates and residues [width, N], skip [width]; state, the initial one, like the final one. `axis`
    is the context-parallel axis. Only plain torch reads `chunk`.
    """
    problem = modal.unsupported_reason(rates, x.shape[1], axis.name)
    if uses_kernel(kernel, "modal", x, problem):
        y, fused_state = _fused_modal(x, rates, residues, skip, documents, state, axis, gated)
        return y, fused_state if final_state else None
    w = gated_input(x) if gated else x
    y, final = modal_scan(
        widen(w),
        rates,
        residues,
        documents,
        state=state,
        axis=axis,
        final_state=final_state,
        chunk=chunk,
    )
    return _add_skip_and_gate(x, w, y, skip, gated), final


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
    """Run the kernel on whole blocks, and compute the remaining tokens all with all."""
    num_blocked = x.shape[1] // modal.BLOCK * modal.BLOCK
    positions = documents.positions if documents is not None else None
    if num_blocked == x.shape[1]:  # a slice of all tokens would copy its gradient
        y, state, _ = modal.modal(x, rates, residues, skip, state, positions, gated, axis.name)
        return y, state
    block_positions, last_positions = (
        (None, None) if positions is None else positions.tensor_split([num_blocked], 1)
    )
    outputs = []
    if num_blocked:
        y, state, _ = modal.modal(
            x[:, :num_blocked], rates, residues, skip, state, block_positions, gated, axis.name
        )
        outputs.append(y)
    if num_blocked < x.shape[1]:
        last_tokens = x[:, num_blocked:]
        w = gated_input(last_tokens) if gated else last_tokens
        y, state = modal_few(widen(w), rates, residues, last_positions, state=state)
        outputs.append(_add_skip_and_gate(last_tokens, w, y, skip, gated))
    assert state is not None
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # cat would copy
    return y, state


def _add_skip_and_gate(x: Tensor, w: Tensor, y: Tensor, skip: Tensor | None, gated: bool) -> Tensor:
    y = y.to(x.dtype)
    if skip is not None:
        y = y + skip * w
    return x[..., : w.shape[-1]] * y if gated else y


def gated_input(x: Tensor) -> Tensor:
    """Return k ⊙ v [..., width] for [q, k, v] [..., 3·width]."""
    _, k, v = x.chunk(3, dim=-1)
    return k * v
