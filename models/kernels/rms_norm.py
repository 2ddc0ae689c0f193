"""RMSNorm, and the sum before it, in one pass over memory; the twin is in models/layers/norms.py.

A program takes whole rows: each is loaded once, reduced in fp32, and stored once. The backward pass
keeps only the input: recomputing a row's scale is cheaper than reading it. Weight gradients are
summed by program, and then over programs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import fp8, layout
from .launch import Launch, Programs, keep_bound
from .op import op

MAX_WIDTH = 1 << 16
"""Kernel limit: numbers per row, which must fit a program's registers."""
MAX_GRAD_PROGRAMS = 512
"""Upper bound on a backward pass's programs: each writes a row of weight gradients."""


@cache
def _programs() -> Programs:
    """Import Triton when a kernel first runs: models import with torch alone."""
    from .programs import rms_norm

    return Programs(rms_norm)


def unsupported_reason(width: int) -> str | None:
    """Return why the kernel cannot take rows of this width, or None."""
    return f"a row has {width} numbers, and its limit is {MAX_WIDTH}" if width > MAX_WIDTH else None


@op("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float, eps_outside: bool) -> Tensor:
    """Return weight · x / √(mean(x²) + eps), or with eps outside the root. x [..., width], weight
    [width]."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=layout.promote_dtypes(x, weight))
    _forward(x, None, weight, out, x, eps, eps_outside)
    return out


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=layout.promote_dtypes(x, weight))


@op("add_rms_norm")
def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, eps_outside: bool
) -> tuple[Tensor, Tensor]:
    """Return residual + x and its `rms_norm`, both [..., width]."""
    x = x.contiguous()
    total = torch.empty_like(x, dtype=layout.promote_dtypes(residual, x))
    out = torch.empty_like(x, dtype=layout.promote_dtypes(total, weight))
    _forward(x, residual.contiguous(), weight, out, total, eps, eps_outside)
    return total, out


@add_rms_norm.register_fake
def _(residual: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    summed = x.new_empty(x.shape, dtype=layout.promote_dtypes(residual, x))
    return summed, x.new_empty(x.shape, dtype=layout.promote_dtypes(summed, weight))


@op("rms_norm_fp8")
def rms_norm_fp8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, eps_outside: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return residual + x (empty without a residual), its `rms_norm`, and that norm in FP8: values
    [..., width] and scales [..., 1]."""
    x = x.contiguous()
    (total, out), stored = _empty_outputs(residual, x, weight), fp8.empty_quantized(x)
    if residual is None:
        _forward(x, None, weight, out, x, eps, eps_outside, stored)
    else:
        _forward(x, residual.contiguous(), weight, out, total, eps, eps_outside, stored)
    return total, out, *stored


@rms_norm_fp8.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_empty_outputs(residual, x, weight), *fp8.empty_quantized(x)


def _empty_outputs(residual: Tensor | None, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the sum and its norm; the sum is empty without a residual."""
    if residual is None:
        return x.new_empty(0), x.new_empty(x.shape, dtype=layout.promote_dtypes(x, weight))
    total = x.new_empty(x.shape, dtype=layout.promote_dtypes(residual, x))
    return total, x.new_empty(x.shape, dtype=layout.promote_dtypes(total, weight))


@op("rms_norm_backward")
def _backward(
    dy: Tensor,
    grad_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    eps_outside: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients for x, with `grad_total` added, and for the weight. dy is the norm's
    gradient."""
    x, dy, width = x.contiguous(), dy.contiguous(), x.shape[-1]
    num_rows = x.numel() // width
    grad_x = torch.empty_like(x)
    block, rows_per_program, warps = layout.row_tile_sizes(width)
    num_tiles = -(-num_rows // rows_per_program)
    num_programs, tiles_per_program = layout.share_tiles(num_tiles, MAX_GRAD_PROGRAMS)
    weight_grads = x.new_empty(num_programs, width, dtype=torch.float32)
    _bind_backward(
        (num_rows, tiles_per_program, width, eps), (num_programs,), ADD=grad_total is not None,
        EPS_OUTSIDE=eps_outside, ROWS=rows_per_program, BLOCK=block,
        **layout.row_loop_options("rms_norm", warps),
    )(
        dy, dy if grad_total is None else grad_total.contiguous(), x, weight.contiguous(), grad_x,
        weight_grads,
    )  # fmt: skip
    return grad_x, weight_grads.sum(0).to(weight.dtype)


@_backward.register_fake
def _(
    grad: Tensor, grad_summed: Tensor | None, x: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    eps_outside: bool,
    stored: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the norm of x (+ residual, into `total`) to `out`, and in FP8 to `stored`."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    _bind_forward((num_rows, width, eps), residual is not None, eps_outside, stored is not None)(
        x, x if residual is None else residual, weight.contiguous(), out, total,
        *(stored or (out, out)),
    )  # fmt: skip


@keep_bound
def _bind_forward(
    sizes: tuple[int, int, float], adds: bool, eps_outside: bool, stores: bool
) -> Launch:
    num_rows, width, _ = sizes
    block, rows_per_program, warps = layout.row_tile_sizes(width)
    return _programs().bind(
        "rms_norm_forward", (-(-num_rows // rows_per_program),), *sizes, ADD=adds,
        EPS_OUTSIDE=eps_outside, FP8=stores, ROWS=rows_per_program, BLOCK=block, num_warps=warps,
    )  # fmt: skip


@keep_bound
def _bind_backward(sizes: tuple[Any, ...], grid: tuple[int], **constants: int) -> Launch:
    return _programs().bind("rms_norm_backward", grid, *sizes, **constants)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, ctx.eps, ctx.eps_outside = inputs
    ctx.save_for_backward(x, weight)


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(dy, None, *ctx.saved_tensors, ctx.eps, ctx.eps_outside)
    return (*grads, None, None)


def _setup_sum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    residual, x, weight, ctx.eps, ctx.eps_outside = inputs
    ctx.dtypes = residual.dtype, x.dtype
    ctx.save_for_backward(output[0], weight)


def _autograd_sum_backward(ctx: Any, grad_total: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    grad_input, grad_weight = _backward(
        dy, grad_total, *ctx.saved_tensors, ctx.eps, ctx.eps_outside
    )
    return *(grad_input.to(kind) for kind in ctx.dtypes), grad_weight, None, None


def _setup_fp8_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, ctx.eps, ctx.eps_outside = inputs
    ctx.dtypes = None if residual is None else (x.dtype, residual.dtype)
    ctx.save_for_backward(x if residual is None else output[0], weight)
    ctx.mark_non_differentiable(*output[2:])


def _autograd_fp8_backward(ctx: Any, grad_total: Tensor, dy: Tensor, *_: Any) -> Any:
    arguments = (*ctx.saved_tensors, ctx.eps, ctx.eps_outside)
    grad_input, grad_weight = _backward(dy, None if ctx.dtypes is None else grad_total, *arguments)
    if ctx.dtypes is None:
        return grad_input, None, grad_weight, None, None
    return *(grad_input.to(kind) for kind in ctx.dtypes), grad_weight, None, None


rms_norm_fp8.register_autograd(_autograd_fp8_backward, setup_context=_setup_fp8_context)
rms_norm.register_autograd(_autograd_backward, setup_context=_setup_context)
add_rms_norm.register_autograd(_autograd_sum_backward, setup_context=_setup_sum_context)


def rms_norm_with_input(
    x: Tensor, weight: Tensor, eps: float, eps_outside: bool, *, store: bool = False
) -> tuple[Tensor, ...]:
    """Return x and its `rms_norm`, [..., width]; with `store`, also the norm's values and scales in
    FP8. The returned x's gradient enters the norm's backward program."""
    if is_compiling():
        return x, *_run_norm(x, weight, eps, eps_outside, store)
    results: tuple[Tensor, ...] = _NormWithInput.apply(x, weight, eps, eps_outside, store)
    return results


def _run_norm(
    x: Tensor, weight: Tensor, eps: float, eps_outside: bool, store: bool
) -> tuple[Tensor, ...]:
    if store:
        normal: tuple[Tensor, ...] = rms_norm_fp8(x, None, weight, eps, eps_outside)[1:]
        return normal
    return (rms_norm(x, weight, eps, eps_outside),)


class _NormWithInput(torch.autograd.Function):
    """A custom op cannot return its input; this function can."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, eps_outside: bool, store: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.eps_options = eps, eps_outside
        ctx.set_materialize_grads(False)
        normal, *stored = _run_norm(x, weight, eps, eps_outside, store)
        ctx.mark_non_differentiable(*stored)
        return x, normal, *stored

    @staticmethod
    def backward(
        ctx: Any, grad_x: Tensor | None, grad: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing reads the norm
            return grad_x, None, None, None, None
        return *_backward(grad, grad_x, *ctx.saved_tensors, *ctx.eps_options), None, None, None
