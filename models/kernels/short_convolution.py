"""Short causal filters with their gates, in one pass over memory, forward and backward.

    y = q ⊙ act(h ∗ w + bias + skip ⊙ w),  w = k ⊙ v,  (h ∗ w)_t = Σ_{j<K} h[group, j] · w_{t−j}

for K up to 16: Hyena's featurizer (no gates), Hyena-SE, Mamba's convolution (a SiLU for `act`).
Each token of x holds q, k and v one after the other, so that their gradients are one tensor too;
without gates x is w. The twin is `plain` in models/layers/gated_convolution.py.

Gradients of the filter are summed by program, and then over programs: the same bits every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .layout import to_channels_last
from .op import op

REACHES = 16
"""Taps of the longest filter."""
SPAN = 256
"""Tokens that a program filters."""
UNROLL = 8
"""Tokens that it filters at a time."""
CHANNELS = 256
"""Channels of a program: two for each thread, whose numbers fill a word.

Long filters take half of UNROLL and CHANNELS: they fill the registers, and compile slowly."""
WARPS = 4
OPTIONAL = ("HISTORY", "BIAS", "SKIP", "PACKED")


@cache
def _programs() -> Any:
    from .programs import short_convolution

    return short_convolution


def unsupported_reason(taps: Tensor) -> str | None:
    """Return why the kernel cannot compute this filter, or None."""
    if taps.shape[1] > REACHES:
        return f"the filter has {taps.shape[1]} taps, and the limit is {REACHES}"
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
    """Filter x [rows, length, width or 3·width]; taps [groups, K], history [rows, K−1, width]."""
    x, optional, sizes, switches, programs = _laid_out(
        x, taps, (history, bias, skip, positions), gated, silu
    )
    history_, bias_, skip_, positions_ = optional
    out = torch.empty(*x.shape[:2], sizes[1], dtype=x.dtype, device=x.device)
    _programs().short_convolution_forward[(programs,)](
        x, history_, taps.contiguous(), bias_, skip_, positions_, out, *sizes, **switches
    )  # fmt: skip
    return out


@short_convolution.register_fake
def _(x: Tensor, taps: Tensor, *others: Any) -> Tensor:
    gated = others[4]
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if gated else x.shape[2])


@op("short_convolution_backward")
def _backward(
    grad: Tensor,
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and the history, and [K + 1, width]: of the taps and the bias."""
    reach = taps.shape[1]
    x, optional, sizes, switches, programs = _laid_out(
        x, taps, (history, bias, skip, positions), gated, silu
    )
    history_, bias_, skip_, positions_ = optional
    width = sizes[1]
    spans = programs // -(-width // switches["CHANNELS"])
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_history = x.new_empty(0) if history is None else torch.empty_like(history_)
    partial = torch.empty(spans, reach + 1, width, dtype=torch.float32, device=x.device)
    _programs().short_convolution_backward[(programs,)](
        grad.contiguous(), x, history_, taps.contiguous(), bias_, skip_, positions_,
        grad_x, grad_history, partial, *sizes, **switches,
    )  # fmt: skip
    return grad_x, grad_history, partial.sum(0)


@_backward.register_fake
def _(grad: Tensor, x: Tensor, taps: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    history = others[2]
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if history is None else history.new_empty(history.shape),
        x.new_empty(taps.shape[1] + 1, grad.shape[2], dtype=torch.float32),
    )


def _laid_out(
    x: Tensor,
    taps: Tensor,
    given: tuple[Tensor | None, ...],
    gated: bool,
    silu: bool,
) -> tuple[Tensor, list[Tensor], tuple[int, ...], dict[str, Any], int]:
    """Return tensors and constants of a launch. `given`: history, bias, skip and positions."""
    x = to_channels_last(x)
    rows, length = x.shape[:2]
    width = x.shape[2] // 3 if gated else x.shape[2]
    divided = 2 if taps.shape[1] > 8 else 1
    sizes = (length, width, width // taps.shape[0], x.stride(0), x.stride(1))
    switches = {
        "REACH": taps.shape[1],
        "GATED": gated,
        "SILU": silu,
        **dict(zip(OPTIONAL, (t is not None for t in given), strict=True)),
        "SPAN": SPAN,
        "UNROLL": UNROLL // divided,
        "CHANNELS": CHANNELS // divided,
        "num_warps": WARPS,
    }
    programs = rows * -(-length // SPAN) * -(-width // switches["CHANNELS"])
    return x, [x if t is None else t.contiguous() for t in given], sizes, switches, programs


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.switches = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # recompute allows one read
    _, taps, bias, skip, history, _ = saved
    grad_x, grad_history, sums = _backward(grad, *saved, *ctx.switches)
    return (
        grad_x,
        of_groups(sums[:-1], taps),
        None if bias is None else sums[-1].to(bias.dtype),
        None if skip is None else sums[0].to(skip.dtype),  # it multiplies what the first tap does
        None if history is None else grad_history,
        *(None, None, None),
    )


def of_groups(sums: Tensor, taps: Tensor) -> Tensor:
    """Sum [K, width] over the channels of each group, to the shape of taps [groups, K]."""
    like: Tensor = sums.unflatten(1, (taps.shape[0], -1)).sum(-1).T.to(taps.dtype)
    return like


short_convolution.register_autograd(_differentiate, setup_context=_keep)
