"""Gated short causal filters, in one pass over memory, forward and backward.

    y = q ⊙ act(h ∗ w + bias + skip ⊙ w),  w = k ⊙ v,  (h ∗ w)_t = Σ_{j<K} h[group, j] · w_{t−j}

for K up to 16: Hyena's featurizer (no gates), Hyena-SE, Mamba's convolution (a SiLU for `act`). A
token in x holds q, k and v one after the other, so that their gradients are one tensor too; without
gates x is w. The twin is `plain` in models/layers/gated_convolution.py.

Filter gradients are summed by program, and then over programs: the same bits every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import choice
from .launch import Launch, Programs, keep_bound
from .layout import to_channels_last
from .op import op

MAX_TAPS = 16
"""Kernel limit: taps per filter."""
SPAN = 256
"""Tokens that a program filters."""
NEXT_SPAN = 128
"""Tokens of a program of `kernels.short_convolution: next`, forward. An H100 holds 1,584 programs
of 3 taps in bf16 at a time: 131,072 tokens of 4,096 channels are 8,192 programs, of which the last
round leaves 14% idle; twice as many leave 6%. The bits are the same."""
UNROLL = 8
"""Tokens filtered at a time."""
CHANNELS = 256
"""Channels per program: two per thread, whose numbers fill a word.

Long filters take UNROLL / 4 and CHANNELS / 2: they fill the registers, and Triton's compile time
grows with the square of a program's loads."""
WARPS = 4
OPTIONAL_INPUTS = ("HISTORY", "BIAS", "SKIP", "PACKED")


@cache
def _programs() -> Programs:
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
    x, (history_, bias_, skip_, positions_), call = _prepare(
        x, taps, (history, bias, skip, positions), gated, silu
    )
    out = x.new_empty(*x.shape[:2], call.width)
    call.forward(x, history_, taps.contiguous(), bias_, skip_, positions_, out)
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
    x, (history_, bias_, skip_, positions_), call = _prepare(
        x, taps, (history, bias, skip, positions), gated, silu
    )
    grad_x = x.new_empty(x.shape)
    grad_history = x.new_empty(0) if history is None else torch.empty_like(history_)
    shape = (call.num_spans, taps.shape[1] + 1, call.width)
    param_grads = x.new_empty(shape, dtype=torch.float32)
    call.backward(
        dy.contiguous(), x, history_, taps.contiguous(), bias_, skip_, positions_, grad_x,
        grad_history, param_grads,
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


class _ConvolutionCall(NamedTuple):
    """What follows from a call's sizes."""

    width: int
    num_spans: int
    forward: Launch
    backward: Launch


def _prepare(
    x: Tensor,
    taps: Tensor,
    optional_inputs: tuple[Tensor | None, ...],
    gated: bool,
    silu: bool,
) -> tuple[Tensor, list[Tensor], _ConvolutionCall]:
    """Return x and optional inputs as programs read them, and the call. `optional_inputs` are
    history, bias, skip and positions."""
    x = to_channels_last(x)
    is_given = tuple(t is not None for t in optional_inputs)
    forward_span = NEXT_SPAN if "short_convolution" in choice.NEXT else SPAN
    call = _bind(x.shape, x.stride()[:2], taps.shape, is_given, gated, silu, forward_span)
    return x, [x if t is None else t.contiguous() for t in optional_inputs], call


@keep_bound
def _bind(
    shape: tuple[int, int, int],
    strides: tuple[int, int],
    taps_shape: tuple[int, int],
    is_given: tuple[bool, ...],
    gated: bool,
    silu: bool,
    forward_span: int,
) -> _ConvolutionCall:
    (num_rows, length, width), (groups, reach) = shape, taps_shape
    width = width // 3 if gated else width
    is_long = reach > 8
    constants = {
        "REACH": reach,
        "GATED": gated,
        "SILU": silu,
        **dict(zip(OPTIONAL_INPUTS, is_given, strict=True)),
        "UNROLL": UNROLL // 4 if is_long else UNROLL,
        "CHANNELS": CHANNELS // 2 if is_long else CHANNELS,
        "num_warps": WARPS,
    }
    sizes = (length, width, width // groups, *strides)

    def bind(name: str, span: int) -> Launch:
        grid = (num_rows * -(-length // span) * -(-width // constants["CHANNELS"]),)
        return _programs().bind(name, grid, *sizes, SPAN=span, **constants)

    return _ConvolutionCall(
        width,
        num_rows * -(-length // SPAN),
        bind("short_convolution_forward", forward_span),
        bind("short_convolution_backward", SPAN),
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
