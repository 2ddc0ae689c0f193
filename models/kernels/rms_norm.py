"""RMSNorm in one pass over memory, forward and backward; its twin is models/norms.py.

A program takes a row at a time: it is loaded once, reduced in fp32, and stored once. Backward
needs nothing of the forward pass but its input: the row's scale is cheaper to work out again than
to read. Gradients of the weight are summed by program, and then over programs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

PROGRAMS = 1024
"""Programs of a backward pass, at most: each keeps one row of weight gradients."""
WIDEST = 1 << 16
"""A row must fit a program's registers."""


@cache
def _kernels() -> tuple[Any, Any]:
    """Triton is imported when a kernel is first asked for: models import with torch alone."""
    from .programs import rms_norm as kernels

    return kernels.forward, kernels.backward


@torch.library.custom_op("headrace::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, eps_outside: bool) -> Tensor:
    """weight · x / √(mean(x²) + eps), or with eps outside of the root."""
    forward, _ = _kernels()
    rows = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty_like(rows)
    forward[(len(rows),)](rows, weight, out, rows.shape[1], eps, eps_outside, _block(rows))
    return out.view(x.shape)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, eps_outside: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("headrace::rms_norm_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, eps_outside: bool
) -> tuple[Tensor, Tensor]:
    _, backward = _kernels()
    rows = x.contiguous().view(-1, x.shape[-1])
    grads = grad.contiguous().view_as(rows)
    out = torch.empty_like(rows)
    programs = min(PROGRAMS, len(rows))
    partial = torch.empty(programs, rows.shape[1], dtype=torch.float32, device=x.device)
    each = -(-len(rows) // programs)
    backward[(programs,)](
        grads, rows, weight, out, partial, len(rows), each, rows.shape[1], eps, eps_outside,
        _block(rows),
    )  # fmt: skip
    return out.view(x.shape), partial.sum(0).to(weight.dtype)


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, eps_outside: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float, bool], output: Tensor) -> None:
    x, weight, ctx.eps, ctx.eps_outside = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight = ctx.saved_tensors
    return (*_backward(grad, x, weight, ctx.eps, ctx.eps_outside), None, None)


rms_norm.register_autograd(_differentiate, setup_context=_keep)


def reaches(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can do this: a GPU, and types and widths that it is made for."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    return x.is_cuda and x.dtype in types and weight.dtype in types and x.shape[-1] <= WIDEST


def _block(rows: Tensor) -> int:
    return 1 << max(rows.shape[1] - 1, 1).bit_length()
