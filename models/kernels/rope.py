"""Rotary positions in one pass over memory; the twin is `plain` in models/layers/rope.py.

The backward pass is the same program with negative angles. x may be a slice of a wider tensor, such
as the queries in a joint projection, or be stored head by head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .launch import Programs
from .op import op

HEADS = 16
"""Heads that a program processes at a time, for one token."""


@cache
def _programs() -> Any:
    from .programs import rope

    return Programs(rope)


@op("rope")
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotate x [rows, length, heads, head_dim], with cos and sin fp32 [rows or 1, length, 1, half],
    half ≤ head_dim / 2. `inverse` negates the angles."""
    rows, length, heads, dim = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rest = dim - 2 * half
    _programs().rope_rotate[(length * rows,)](
        x, cos.contiguous(), sin.contiguous(), out, heads, dim, length, half, *x.stride()[:3],
        0 if len(cos) == 1 else length * half, INVERSE=inverse,
        HEADS=min(HEADS, _round_to_power(heads)), HALF=_round_to_power(half),
        REST=_round_to_power(num_rest) if num_rest else 0, num_warps=4,
    )  # fmt: skip
    return out


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _round_to_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return rope(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


rope.register_autograd(_autograd_backward, setup_context=_setup_context)
