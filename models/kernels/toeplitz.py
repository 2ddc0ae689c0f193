"""Medium causal filters with their gates, as blocks of a Toeplitz matrix on the matrix units.

    y = q ⊙ (h ∗ w + skip ⊙ w),  w = k ⊙ v            Hyena-MR
    Y_n = H₀·W_n + H₁·W_{n−1} + …                      chunks of a row, and blocks of the filter

H₀ holds the lags within a chunk, and the others what spills over from the chunks before: two
passes for a filter of up to a chunk and a token, another for each chunk more, so that every
filter is exact. Everything is read and written once. Its twin is `plain` in
models/gated_convolution.py.

In bf16 and fp16 the products are of rounded numbers (w and the taps), summed in fp32; in fp32
three products of tf32 stand for one. The filter's gradient is the sum, over chunks, of G_n·W_{n−p}ᵀ
along its diagonals: it stays in registers until the program ends.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .layout import by_token, splits

CHUNK = 64
"""Sides of a block: as many rows as one instruction of the matrix units takes."""
COLUMNS = 64
"""Of a product: the channels of a group, of so many chunks at once."""
REACHES = 4 * CHUNK + 1
"""Taps of the longest filter: five passes."""
OPTIONAL = ("HISTORY", "SKIP", "PACKED")


@cache
def _programs() -> Any:
    from .programs import toeplitz

    return toeplitz


def beyond(taps: Tensor, *, bias: bool = False, silu: bool = False) -> str | None:
    """What keeps the kernel from this filter."""
    if taps.shape[1] > REACHES:
        return f"the filter has {taps.shape[1]} taps, and it reaches {REACHES}"
    if bias or silu:
        return "it has no bias and no SiLU"
    return None


@torch.library.custom_op("headrace::toeplitz", mutates_args=())
def toeplitz(
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> Tensor:
    """x [rows, length, width or 3·width], taps [groups, K], history [rows, K−1, width] of w."""
    x, (history_, skip_, positions_), sizes, switches = _laid_out(
        x, taps, (history, skip, positions), gated
    )
    rows, length, width, blocks = len(x), *sizes[:2], sizes[3]
    columns = taps.shape[0] * blocks
    parts, each = splits(-(-length // (CHUNK * switches["CHUNKS"])), columns * rows)
    out = torch.empty(rows, length, width, dtype=x.dtype, device=x.device)
    _programs().forward[(parts * columns, rows)](
        x, history_, taps.contiguous(), skip_, positions_, out, *sizes, each, **switches,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


@toeplitz.register_fake
def _(x: Tensor, taps: Tensor, *others: Any) -> Tensor:
    gated = others[3]
    return x.new_empty(*x.shape[:2], x.shape[2] // 3 if gated else x.shape[2])


@torch.library.custom_op("headrace::toeplitz_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    taps: Tensor,
    skip: Tensor | None,
    history: Tensor | None,
    positions: Tensor | None,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, the taps (fp32), the skip (fp32) and the history."""
    x, (history_, skip_, positions_), sizes, switches = _laid_out(
        x, taps, (history, skip, positions), gated
    )
    rows, length, width, blocks = len(x), *sizes[:2], sizes[3]
    groups, passes = taps.shape[0], switches["PASSES"]
    chunks = -(-length // CHUNK) + (passes - 1 if history is not None else 0)
    parts, each = splits(-(-chunks // switches["CHUNKS"]), groups * blocks * rows)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grad_history = x.new_empty(0) if history is None else torch.empty_like(history_)
    shape = (rows * parts, groups, blocks, passes, CHUNK, CHUNK)
    met = torch.empty(shape, dtype=torch.float32, device=x.device)
    partial = x.new_empty(rows * parts, width if skip is not None else 0, dtype=torch.float32)
    _programs().backward[(parts * groups * blocks, rows)](
        grad.contiguous(), x, history_, taps.contiguous(), skip_, positions_,
        grad_x, grad_history, met, partial, *sizes, each, **switches,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return grad_x, diagonals(met.sum((0, 2)), taps.shape[1]), partial.sum(0), grad_history


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, taps: Tensor, skip: Tensor | None, history: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        taps.new_empty(taps.shape, dtype=torch.float32),
        x.new_empty(0 if skip is None else skip.shape[0], dtype=torch.float32),
        x.new_empty(0) if history is None else history.new_empty(history.shape),
    )


def diagonals(met: Tensor, reach: int) -> Tensor:
    """[groups, passes, t, s] → [groups, K]: the sum of all with t − s + pass · CHUNK = k."""
    passes, side = met.shape[1], met.shape[3]
    time = torch.arange(side, device=met.device)
    lag = (time[:, None] - time) + side * torch.arange(passes, device=met.device)[:, None, None]
    inside = (lag >= 0) & (lag < reach)
    sums = met.new_zeros(met.shape[0], reach)
    return sums.index_add_(1, lag[inside], met[:, inside])


def _laid_out(
    x: Tensor, taps: Tensor, given: tuple[Tensor | None, ...], gated: bool
) -> tuple[Tensor, list[Tensor], tuple[int, ...], dict[str, Any]]:
    """`given`: the history, the skip and the positions, or None."""
    x = by_token(x)
    width = x.shape[2] // 3 if gated else x.shape[2]
    share = width // taps.shape[0]
    side = min(max(16, 1 << (share - 1).bit_length()), COLUMNS)
    sizes = (x.shape[1], width, share, -(-share // side), x.stride(0), x.stride(1))
    switches = {
        "REACH": taps.shape[1],
        "PASSES": -(-(taps.shape[1] - 1) // CHUNK) + 1,
        "CHUNK": CHUNK,
        "CHUNKS": COLUMNS // side,
        "SIDE": side,
        "GATED": gated,
        **dict(zip(OPTIONAL, (t is not None for t in given), strict=True)),
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee",
    }
    return x, [x if t is None else t.contiguous() for t in given], sizes, switches


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.gated = inputs[5]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _, taps, skip, history, _ = ctx.saved_tensors
    grad_x, grad_taps, grad_skip, grad_history = _backward(grad, *ctx.saved_tensors, ctx.gated)
    return (
        grad_x,
        grad_taps.to(taps.dtype),
        None if skip is None else grad_skip.to(skip.dtype),
        None if history is None else grad_history,
        None,
        None,
    )


toeplitz.register_autograd(_differentiate, setup_context=_keep)
