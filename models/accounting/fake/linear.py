"""Linear layers with an engine's linear function.

DeepSpeed's ZeRO-3 replaces torch's function (`deepspeed.runtime.zero.linear`). Recompute that saves
products then saves less:

    torch   x·Wᵀ + b is a single operation, whose result is saved. Autograd saves its inputs first:
            a layer that ends with it is recomputed up to there, and the saved result lives until
            the backward pass ends.
    zero3   b is added in place, which drops the saved product. Inputs are saved after the product:
            the recomputation takes the saved product, which is then freed.

In the backward pass, ZeRO-3 computes dx before dW, and returns both at once.
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
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = out_grad.reshape(-1, out_grad.shape[-1])
        return (
            out_grad.matmul(weight) if needs_x else None,
            rows.t().matmul(x.reshape(-1, x.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _zero3(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _Zero3Linear.apply(x, weight, bias)
    return result


LINEAR_FUNCTIONS: dict[LinearForm, Any] = {"torch": torch._C._nn.linear, "zero3": _zero3}


@contextmanager
def linear_layers(form: LinearForm) -> Iterator[None]:
    """Use this linear function inside. A process that has run ZeRO-3 keeps DeepSpeed's function, so
    torch's is set too."""
    original, F.linear = F.linear, LINEAR_FUNCTIONS[form]
    try:
        yield
    finally:
        F.linear = original
