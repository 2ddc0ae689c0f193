"""Gradients received from the next pipeline stage, as a loss term.

    loss + attach_gradients(stream, gradients)    value: loss; gradient of stream: `gradients`

So every backward pass starts from a loss, and engines need no second entry point. This term's
upstream gradient is ignored: an engine's scale factors are applied once, where the loss is
computed, and the received gradients already include them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def attach_gradients(stream: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a zero whose gradient with respect to `stream` is `gradients`."""
    zero: Tensor = _AttachGradients.apply(tuple(gradients), *stream)
    return zero


class _AttachGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *stream: Tensor) -> Tensor:
        ctx.gradients = gradients
        return stream[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, ()  # a caller that holds the loss holds no more
        return None, *gradients
