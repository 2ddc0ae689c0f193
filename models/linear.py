"""One matrix product for several named projections of the same input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SplitLinear(nn.Module):
    """Returns one tensor for each part: `q, k, v = SplitLinear(d, {"q": d, "k": d, "v": d})(x)`.

    The names say which rows of the weight belong to what, so that a tensor-parallel layout can
    cut every part by itself and a converter can take it out.
    """

    def __init__(self, width: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.parts = dict(parts)
        size = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(size, width))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(self.joined(x), list(self.parts.values()), dim=-1)

    def joined(self, x: Tensor) -> Tensor:
        """The parts one after the other, for kernels that take them so."""
        return F.linear(x, self.weight, self.bias)
