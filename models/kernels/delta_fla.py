"""The delta rule by fla's Triton programs, for `kernel: fla`: packed rows as one row of documents.

The backward pass computes the forward pass again, through fla's own gradients. The twin is
`delta_rule` in models/layers/delta/rule.py.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .op import op


def missing_reason() -> str | None:
    """Return why fla cannot be imported, or None."""
    return None if find_spec("fla") else "fla is not installed"


@cache
def _functions() -> tuple[Any, Any]:
    """Return fla's functions for one decay and for a decay of each channel."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    return chunk_gated_delta_rule, chunk_kda


def _compute(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ends: Tensor) -> Tensor:
    by_head, by_channel = _functions()
    function = by_channel if g.shape[-1] > 1 else by_head
    g = g if g.shape[-1] > 1 else g.squeeze(-1)
    tensors = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
    y: Tensor = function(*tensors, scale=1.0, cu_seqlens=ends.long())[0]
    return y.view(v.shape)


@op("delta_fla")
def delta_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ends: Tensor) -> Tensor:
    """Return y like v; shapes as in `delta`. `ends` holds 0 and the ends of all documents in the
    flattened rows."""
    with torch.no_grad():
        return _compute(q, k, v, g, beta, ends)


@delta_fla.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


@op("delta_fla_backward")
def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients for q, k, v, g and beta."""
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v, g, beta))
        y = _compute(*leaves, ends)  # type: ignore[call-arg]
        dq, dk, dv, dg, dbeta = torch.autograd.grad(y, leaves, dy)
    return dq, dk, dv, dg, dbeta


@_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(dy, *ctx.saved_tensors), None)


delta_fla.register_autograd(_autograd_backward, setup_context=_setup_context)
