"""Gradients that arrive from another stage of a pipeline, as a term of the loss.

    loss + handed(stream, gradients)       value: loss; gradient of stream: `gradients`, unscaled

So a backward pass always starts from a loss, and engines need no other entry. The gradient of this
term itself is ignored: the factors of an engine are applied once, where the loss is computed, and
travel with the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def handed(stream: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a zero whose gradient with respect to `stream` is `gradients`."""
    zero: Tensor = _Handed.apply(tuple(gradients), *stream)
    return zero


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *stream: Tensor) -> Tensor:
        ctx.gradients = gradients
        return stream[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, ()  # a caller that holds the loss holds no more
        return None, *gradients
