"""Linear layers as an engine computes them.

DeepSpeed's ZeRO-3 replaces torch's function (`deepspeed.runtime.zero.linear`). Recompute that keeps
products keeps less then:

    torch   x·Wᵀ + b is one operation, whose result is kept. It saves its inputs before: a layer
            that ends with it is recomputed up to there, and its kept result waits for the end of
            the backward pass.
    zero3   b is added in place, so that the kept product is dropped. Inputs are saved after the
            product: the recomputation takes the kept one, which then ends.

In the backward pass ZeRO-3 computes the gradient of x before that of W, and returns both at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...config.options.names import LinearForm


class _Zero3Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        y = x.matmul(weight.t())
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if of_x else None,
            rows.t().matmul(x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _zero3(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _Zero3Linear.apply(x, weight, bias)
    return result


FORMS: dict[LinearForm, Any] = {"torch": torch._C._nn.linear, "zero3": _zero3}


@contextmanager
def linear_layers(form: LinearForm) -> Iterator[None]:
    """Compute linear layers in this form inside. DeepSpeed's function stays in a process that has
    run ZeRO-3, so both forms are set."""
    before, F.linear = F.linear, FORMS[form]
    try:
        yield
    finally:
        F.linear = before
