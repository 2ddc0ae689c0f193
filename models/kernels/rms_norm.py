"""RMSNorm, and the sum before it, in one pass over memory; the twin is in models/layers/norms.py.

A program takes whole rows: each is loaded once, reduced in fp32, and stored once. The backward pass
keeps only the input: recomputing a row's scale is cheaper than reading it. Gradients of the weight
are summed by program, and then over programs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import fp8, layout
from .op import op

WIDEST = 1 << 16
"""Numbers of the widest row: it must fit a program's registers."""
SUMMED = 512
"""Most programs of a backward pass: each writes a row of weight gradients."""


@cache
def _programs() -> Any:
    """Import Triton when a kernel first runs: models import with torch alone."""
    from .programs import rms_norm

    return rms_norm


def unsupported_reason(width: int) -> str | None:
    """Return why the kernel cannot take rows of this width, or None."""
    return f"a row has {width} numbers, and its limit is {WIDEST}" if width > WIDEST else None


@op("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float, eps_outside: bool) -> Tensor:
    """Return weight · x / √(mean(x²) + eps), or with eps outside the root."""
    rows = _rows(x)
    out = torch.empty_like(rows, dtype=layout.promote_dtypes(x, weight))
    _forward(rows, None, weight, out, rows, eps, eps_outside)
    return out.view(x.shape)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=layout.promote_dtypes(x, weight))


@op("add_rms_norm")
def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, eps_outside: bool
) -> tuple[Tensor, Tensor]:
    """Return residual + x, and its `rms_norm`."""
    rows = _rows(x)
    summed = torch.empty_like(rows, dtype=layout.promote_dtypes(residual, x))
    out = torch.empty_like(rows, dtype=layout.promote_dtypes(summed, weight))
    _forward(rows, residual.contiguous(), weight, out, summed, eps, eps_outside)
    return summed.view(x.shape), out.view(x.shape)


@add_rms_norm.register_fake
def _(residual: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    summed = x.new_empty(x.shape, dtype=layout.promote_dtypes(residual, x))
    return summed, x.new_empty(x.shape, dtype=layout.promote_dtypes(summed, weight))


@op("rms_norm_fp8")
def rms_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, eps_outside: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return residual + x (nothing without a residual), its `rms_norm`, and the values and scales
    of that norm in FP8."""
    rows, summed, out, stored = _rows(x), *_empty(residual, x, weight), fp8.empty(x)
    if residual is None:
        _forward(rows, None, weight, out, rows, eps, eps_outside, stored)
    else:
        _forward(rows, residual.contiguous(), weight, out, summed, eps, eps_outside, stored)
    return summed, out, *stored


@rms_norm_fp8.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_empty(residual, x, weight), *fp8.empty(x)


def _empty(residual: Tensor | None, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the sum and its norm; none for the sum without a residual."""
    if residual is None:
        return x.new_empty(0), x.new_empty(x.shape, dtype=layout.promote_dtypes(x, weight))
    summed = x.new_empty(x.shape, dtype=layout.promote_dtypes(residual, x))
    return summed, x.new_empty(x.shape, dtype=layout.promote_dtypes(summed, weight))


@op("rms_norm_backward")
def _backward(
    grad: Tensor,
    grad_summed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    eps_outside: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, with the gradient of the sum added, and that of the weight."""
    rows = _rows(x)
    grads = grad.contiguous()
    out = torch.empty_like(rows)
    block, tile, warps = layout.row_tile_sizes(rows.shape[1])
    tiles = -(-len(rows) // tile)
    programs, each = layout.share_tiles(tiles, SUMMED)
    partial = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=x.device)
    _programs().rms_norm_backward[(programs,)](
        grads, grads if grad_summed is None else grad_summed.contiguous(), rows,
        weight.contiguous(), out, partial, len(rows), each, rows.shape[1], eps,
        ADD=grad_summed is not None, EPS_OUTSIDE=eps_outside, ROWS=tile, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return out.view(x.shape), partial.sum(0).to(weight.dtype)


@_backward.register_fake
def _(
    grad: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _forward(
    rows: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    summed: Tensor,
    eps: float,
    eps_outside: bool,
    stored: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`stored` takes the values and scales of `out` in FP8."""
    block, tile, warps = layout.row_tile_sizes(rows.shape[1])
    _programs().rms_norm_forward[(-(-len(rows) // tile),)](
        rows, rows if residual is None else residual, weight.contiguous(), out, summed,
        *(stored or (out, out)), *rows.shape, eps,
        ADD=residual is not None, EPS_OUTSIDE=eps_outside, FP8=stored is not None, ROWS=tile,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.eps, ctx.eps_outside = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad, None, *ctx.saved_tensors, ctx.eps, ctx.eps_outside)
    return (*grads, None, None)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    residual, x, weight, ctx.eps, ctx.eps_outside = inputs
    ctx.kinds = residual.dtype, x.dtype
    ctx.save_for_backward(output[0], weight)


def _differentiate_sum(ctx: Any, grad_summed: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_sum, of_weight = _backward(grad, grad_summed, *ctx.saved_tensors, ctx.eps, ctx.eps_outside)
    return *(of_sum.to(kind) for kind in ctx.kinds), of_weight, None, None


def _keep_stored(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, ctx.eps, ctx.eps_outside = inputs
    ctx.kinds = None if residual is None else (x.dtype, residual.dtype)
    ctx.save_for_backward(x if residual is None else output[0], weight)
    ctx.mark_non_differentiable(*output[2:])


def _differentiate_stored(ctx: Any, grad_summed: Tensor, grad: Tensor, *_: Any) -> Any:
    how = (*ctx.saved_tensors, ctx.eps, ctx.eps_outside)
    of_sum, of_weight = _backward(grad, None if ctx.kinds is None else grad_summed, *how)
    if ctx.kinds is None:
        return of_sum, None, of_weight, None, None
    return *(of_sum.to(kind) for kind in ctx.kinds), of_weight, None, None


rms_norm_fp8.register_autograd(_differentiate_stored, setup_context=_keep_stored)
rms_norm.register_autograd(_differentiate, setup_context=_keep)
add_rms_norm.register_autograd(_differentiate_sum, setup_context=_keep_sum)


def beside(
    x: Tensor, weight: Tensor, eps: float, eps_outside: bool, *, store: bool = False
) -> tuple[Tensor, ...]:
    """Return x and its `rms_norm`; with `store`, also the values and scales of the norm in FP8.
    The gradient of the returned x enters the backward program of the norm."""
    if is_compiling():
        return x, *_norm(x, weight, eps, eps_outside, store)
    results: tuple[Tensor, ...] = _Beside.apply(x, weight, eps, eps_outside, store)
    return results


def _norm(
    x: Tensor, weight: Tensor, eps: float, eps_outside: bool, store: bool
) -> tuple[Tensor, ...]:
    if store:
        normal: tuple[Tensor, ...] = rms_norm_fp8(x, None, weight, eps, eps_outside)[1:]
        return normal
    return (rms_norm(x, weight, eps, eps_outside),)


class _Beside(torch.autograd.Function):
    """A custom op cannot return its input; this function can."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, eps_outside: bool, store: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.how = eps, eps_outside
        ctx.set_materialize_grads(False)
        normal, *stored = _norm(x, weight, eps, eps_outside, store)
        ctx.mark_non_differentiable(*stored)
        return x, normal, *stored

    @staticmethod
    def backward(
        ctx: Any, grad_x: Tensor | None, grad: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing reads the norm
            return grad_x, None, None, None, None
        return *_backward(grad, grad_x, *ctx.saved_tensors, *ctx.how), None, None, None
