"""Short causal filters with their gates, in one pass over memory, forward and backward.

    y = q ⊙ (h ∗ w + bias + skip ⊙ w),  w = k ⊙ v,  (h ∗ w)_t = Σ_{j<K} h[group, j] · w_{t−j}

for K up to 16: Hyena's featurizer (no gates), Hyena-SE, Mamba's convolution (a SiLU for a gate).
Each token of x holds q, k and v one after the other, so that their gradients are one tensor as
well; without gates it is w. Its twin is `plain` in models/gated_convolution.py.

Gradients of the filter are summed by program, and then over programs: the same bits every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .layout import by_token, splits

REACHES = 16
"""Taps of the longest filter."""
REACHES_SILU = 8
"""With a SiLU, the backward pass filters again for each tap."""
TOKENS, CHANNELS = 32, 64
"""A tile: 128 bytes of channels in bf16, and a halo that is small beside it."""


@cache
def _programs() -> Any:
    from .programs import short_convolution

    return short_convolution


def beyond(taps: Tensor, *, gated: bool = False, silu: bool = False) -> str | None:
    """What keeps the kernel from this filter."""
    if gated and silu:
        return "it has a SiLU or gates, not both"
    most = REACHES_SILU if silu else REACHES
    if taps.shape[1] > most:
        return f"the filter has {taps.shape[1]} taps, and it reaches {most}"
    return None


@torch.library.custom_op("headrace::short_convolution", mutates_args=())
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
    """x [rows, length, width or 3·width], taps [groups, K], history [rows, K−1, width] of w."""
    x, width, sizes, switches = _laid_out(x, taps, bias, skip, history, positions, gated, silu)
    rows, length = x.shape[:2]
    out = torch.empty(rows, length, width, dtype=x.dtype, device=x.device)
    grid = (-(-length // TOKENS) * -(-width // CHANNELS), rows)
    optional = [x if t is None else t.contiguous() for t in (history, bias, skip, positions)]
    history_, bias_, skip_, positions_ = optional
    _programs().forward[grid](
        x, history_, taps.contiguous(), bias_, skip_, positions_, out, *sizes, **switches,
        num_warps=4 if taps.shape[1] <= 8 else 8,
    )  # fmt: skip
    return out


@short_convolution.register_fake
def _(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    silu: bool,
) -> Tensor:
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if gated else x.shape[2])


@torch.library.custom_op("headrace::short_convolution_backward", mutates_args=())
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
    """The gradients of x and history; [K + 2, width]: those of the taps, the bias and the skip."""
    x, width, sizes, switches = _laid_out(x, taps, bias, skip, history, positions, gated, silu)
    rows, length = x.shape[:2]
    reach = taps.shape[1]
    blocks = -(-width // CHANNELS)
    tiles = -(-(length + (reach - 1 if history is not None else 0)) // TOKENS)
    parts, each = splits(tiles, blocks * rows)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_history = x.new_empty(0) if history is None else torch.empty_like(history).contiguous()
    partial = torch.empty(rows * parts, reach + 2, width, dtype=torch.float32, device=x.device)
    optional = [x if t is None else t.contiguous() for t in (history, bias, skip, positions)]
    history_, bias_, skip_, positions_ = optional
    _programs().backward[(parts * blocks, rows)](
        grad.contiguous(), x, history_, taps.contiguous(), bias_, skip_, positions_,
        grad_x, grad_history, partial, *sizes, each, **switches, num_warps=8,
    )  # fmt: skip
    return grad_x, grad_history, partial.sum(0)


@_backward.register_fake
def _(
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
    width = x.shape[2] // 3 if gated else x.shape[2]
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if history is None else history.new_empty(history.shape),
        x.new_empty(taps.shape[1] + 2, width, dtype=torch.float32),
    )


def _laid_out(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
    silu: bool,
) -> tuple[Tensor, int, tuple[int, ...], dict[str, Any]]:
    x = by_token(x)
    width = x.shape[2] // 3 if gated else x.shape[2]
    sizes = (x.shape[1], width, width // taps.shape[0], x.stride(0), x.stride(1))
    switches = {
        "REACH": taps.shape[1],
        "GATED": gated,
        "SILU": silu,
        "BIAS": bias is not None,
        "SKIP": skip is not None,
        "HISTORY": history is not None,
        "PACKED": positions is not None,
        "TOKENS": TOKENS,
        "CHANNELS": CHANNELS,
    }
    return x, width, sizes, switches


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.switches = inputs[6:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, taps, bias, skip, history, _ = ctx.saved_tensors
    grad_x, grad_history, sums = _backward(grad, *ctx.saved_tensors, *ctx.switches)
    return (
        grad_x,
        of_groups(sums[:-2], taps),
        None if bias is None else sums[-2].to(bias.dtype),
        None if skip is None else sums[-1].to(skip.dtype),
        None if history is None else grad_history,
        *(None, None, None),
    )


def of_groups(sums: Tensor, taps: Tensor) -> Tensor:
    """[K, width] of the channels → like taps [groups, K]."""
    like: Tensor = sums.unflatten(1, (taps.shape[0], -1)).sum(-1).T.to(taps.dtype)
    return like


short_convolution.register_autograd(_differentiate, setup_context=_keep)
