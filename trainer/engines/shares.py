"""What tensor parallelism asks of an engine: sums of gradients, and the norm of all of them.

A parameter that is divided over the tensor axis has its gradient complete where it is. One that
all processes of the axis have, a norm's or a router's, has a part of it on each: the parts are
summed before anything else is done with them, and it counts once in the norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ...models.parallel.axes import Axis
from ...models.parallel.sharding import LocalShard

SMALL = 1e-6
"""Keeps a clipping factor finite, as torch's own does."""


class Shares:
    def __init__(self, parts: Mapping[str, LocalShard], axis: Axis) -> None:
        self.axis = axis
        self.shared = {name for name, part in parts.items() if part.shared}

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        """In place, those that all processes have; one message. Collective."""
        mine = [gradient for name, gradient in gradients.items() if name in self.shared]
        if not mine:
            return
        whole = torch.cat([gradient.flatten() for gradient in mine])
        dist.all_reduce(whole, group=self.axis.group)
        for gradient, total in zip(mine, whole.split([g.numel() for g in mine]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def summed(self, gradient: Tensor) -> Tensor:
        """The sum of one, for a hook. Collective."""
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=self.axis.group)
        return total.to(gradient.dtype)

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Of all parameters, wherever their parts are. Collective."""
        own = [gradient for name, gradient in gradients.items() if name not in self.shared]
        everyones = [gradient for name, gradient in gradients.items() if name in self.shared]
        norm = _norm(own)
        if self.axis.size > 1:
            square = norm.square()
            dist.all_reduce(square, group=self.axis.group)
            norm = (square + _norm(everyones).square()).sqrt()
        return float(norm)


def clip(gradients: Mapping[str, Tensor], norm: float, limit: float) -> None:
    """Scale them down, if their norm is above the limit; 0 is none."""
    if limit and norm > limit:
        torch._foreach_mul_(list(gradients.values()), limit / (norm + SMALL))


def _norm(gradients: list[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(gradients)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
