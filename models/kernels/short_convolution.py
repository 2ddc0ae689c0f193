"""Gated short causal filters, in one pass over memory, forward and backward.

    y = q ⊙ act(h ∗ w + bias + skip ⊙ w),  w = k ⊙ v,  (h ∗ w)_t = Σ_{j<K} h[group, j] · w_{t−j}

for K up to 16: Hyena's featurizer (no gates), Hyena-SE, Mamba's convolution (a SiLU for `act`). A
token in x holds q, k and v one after the other, so that their gradients are one tensor too; without
gates x is w. The twin is `plain` in models/layers/gated_convolution.py.

Filter gradients are summed by program, and then over programs: the same bits every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .launch import Programs
from .layout import to_channels_last
from .op import op

MAX_TAPS = 16
"""Kernel limit: taps per filter."""
SPAN = 256
"""Tokens that a program filters."""
UNROLL = 8
"""Tokens filtered at a time."""
CHANNELS = 256
"""Channels per program: two per thread, whose numbers fill a word.

Long filters take UNROLL / 4 and CHANNELS / 2: they fill the registers, and Triton's compile time
grows with the square of a program's loads."""
WARPS = 4
OPTIONAL_INPUTS = ("HISTORY", "BIAS", "SKIP", "PACKED")


@cache
def _programs() -> Any:
    from .programs import short_convolution

    return Programs(short_convolution)


def unsupported_reason(taps: Tensor) -> str | None:
    """Return why the kernel does not support taps [groups, K], or None."""
    if taps.shape[1] > MAX_TAPS:
        return f"the filter has {taps.shape[1]} taps, and the limit is {MAX_TAPS}"
    return None


@op("short_convolution")
def short_convolution(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    silu: bool,
) -> Tensor:
    """Return y [rows, length, width] for x [rows, length, width], or [rows, length, 3·width] if
    `gated`: q, k and v. taps [groups, K], bias and skip [width], history [rows, K−1, width],
    positions [rows, length] for packed rows."""
    x, optional_inputs, sizes, constants, num_programs = _launch_layout(
        x, taps, (history, bias, skip, positions), gated, silu
    )
    history_, bias_, skip_, positions_ = optional_inputs
    out = torch.empty(*x.shape[:2], sizes[1], dtype=x.dtype, device=x.device)
    _programs().short_convolution_forward[(num_programs,)](
        x, history_, taps.contiguous(), bias_, skip_, positions_, out, *sizes, **constants,
    )  # fmt: skip
    return out


@short_convolution.register_fake
def _(x: Tensor, taps: Tensor, *arguments: Any) -> Tensor:
    gated = arguments[4]
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if gated else x.shape[2])


@op("short_convolution_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for x and history, and for each channel's taps and bias, [K + 1,
    width]."""
    reach = taps.shape[1]
    x, optional_inputs, sizes, constants, num_programs = _launch_layout(
        x, taps, (history, bias, skip, positions), gated, silu
    )
    history_, bias_, skip_, positions_ = optional_inputs
    width = sizes[1]
    num_spans = num_programs // -(-width // constants["CHANNELS"])
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_history = x.new_empty(0) if history is None else torch.empty_like(history_)
    param_grads = torch.empty(num_spans, reach + 1, width, dtype=torch.float32, device=x.device)
    _programs().short_convolution_backward[(num_programs,)](
        dy.contiguous(), x, history_, taps.contiguous(), bias_, skip_, positions_, grad_x,
        grad_history, param_grads, *sizes, **constants,
    )  # fmt: skip
    return grad_x, grad_history, param_grads.sum(0)


@_backward.register_fake
def _(grad: Tensor, x: Tensor, taps: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    history = arguments[2]
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if history is None else history.new_empty(history.shape),
        x.new_empty(taps.shape[1] + 1, grad.shape[2], dtype=torch.float32),
    )


def _launch_layout(
    x: Tensor,
    taps: Tensor,
    optional_inputs: tuple[Tensor | None, ...],
    gated: bool,
    silu: bool,
) -> tuple[Tensor, list[Tensor], tuple[int, ...], dict[str, Any], int]:
    """Return a launch's tensors and constants. `optional_inputs` are history, bias, skip and
    positions."""
    x = to_channels_last(x)
    num_rows, length = x.shape[:2]
    width = x.shape[2] // 3 if gated else x.shape[2]
    is_long = taps.shape[1] > 8
    sizes = (length, width, width // taps.shape[0], x.stride(0), x.stride(1))
    constants = {
        "REACH": taps.shape[1],
        "GATED": gated,
        "SILU": silu,
        **dict(zip(OPTIONAL_INPUTS, (t is not None for t in optional_inputs), strict=True)),
        "SPAN": SPAN,
        "UNROLL": UNROLL // 4 if is_long else UNROLL,
        "CHANNELS": CHANNELS // 2 if is_long else CHANNELS,
        "num_warps": WARPS,
    }
    num_programs = num_rows * -(-length // SPAN) * -(-width // constants["CHANNELS"])
    return (
        x,
        [x if t is None else t.contiguous() for t in optional_inputs],
        sizes,
        constants,
        num_programs,
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    _, taps, bias, skip, history, _ = saved
    grad_x, grad_history, param_grads = _backward(dy, *saved, *ctx.options)
    return (
        grad_x,
        sum_by_group(param_grads[:-1], taps),
        None if bias is None else param_grads[-1].to(bias.dtype),
        None
        if skip is None
        else param_grads[0].to(skip.dtype),  # it multiplies what the first tap does
        None if history is None else grad_history,
        *(None, None, None),
    )


def sum_by_group(channel_sums: Tensor, taps: Tensor) -> Tensor:
    """Sum [K, width] over each group's channels, to taps' shape [groups, K]."""
    if channel_sums.shape[1] == taps.shape[0]:
        return channel_sums.T.to(taps.dtype)
    group_sums: Tensor = channel_sums.unflatten(1, (taps.shape[0], -1)).sum(-1).T.to(taps.dtype)
    return group_sums


short_convolution.register_autograd(_autograd_backward, setup_context=_setup_context)
