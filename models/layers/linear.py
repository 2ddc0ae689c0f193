"""The two ends of an operator: several named projections of one input, and the way back."""

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

    def forward(self, x: Tensor, *, joined: bool = False) -> Tensor | tuple[Tensor, ...]:
        """`joined` leaves the parts one after the other, for kernels that take them so. (Only a
        module's call brings its weights along where an engine has divided them.)"""
        y = F.linear(x, self.weight, self.bias)
        return y if joined else torch.split(y, list(self.parts.values()), dim=-1)


class OutputLinear(nn.Linear):
    """The projection back to the residual stream.

    Under tensor parallelism each process has some of the inputs, and what comes out of all is
    summed: each adds its share of the bias.
    """

    processes: int = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or self.processes == 1:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias / self.processes)
