"""Projections at the two ends of an operator: several named ones of one input, and the output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..parallel.axes import Axis
from ..parallel.sharding import Sharded, ShardingSpec


class SplitLinear(nn.Module):
    """Returns one tensor for each part: `q, k, v = SplitLinear(d, {"q": d, "k": d, "v": d})(x)`.

    `parts` names the rows of the weight, so that tensor parallelism can shard each part
    separately and conversion can extract it.
    """

    def __init__(self, width: int, parts: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.parts = dict(parts)
        size = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(size, width))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor, *, joined: bool = False) -> Tensor | tuple[Tensor, ...]:
        """`joined` returns the parts concatenated, for kernels that take them so. (ZeRO-3 gathers
        weights at a module's call, so nothing else may read them.)"""
        y = F.linear(x, self.weight, self.bias)
        return y if joined else torch.split(y, list(self.parts.values()), dim=-1)

    def resize(self, axis: Axis) -> None:
        self.parts = {name: len(axis.part_range(size)) for name, size in self.parts.items()}


class OutputLinear(nn.Linear):
    """The projection back to the residual stream.

    Under tensor parallelism each rank has some of the inputs, and the ranks' outputs are summed:
    each rank adds bias / ranks.
    """

    ranks: int = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or self.ranks == 1:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias / self.ranks)

    def resize(self, axis: Axis) -> None:
        self.ranks = axis.size


def outputs(name: str, linear: nn.Linear | SplitLinear, *, blocks: int = 1) -> ShardingSpec:
    """Shard the matrix `name` by its outputs: each part of a SplitLinear separately, and if a part
    consists of several `blocks`, each block."""
    sizes = [len(linear.weight)]
    if isinstance(linear, SplitLinear):
        sizes = list(linear.parts.values())
    shard = Sharded(0, tuple(size // blocks for size in sizes for _ in range(blocks)))
    return {f"{name}.weight": shard, f"{name}.bias": shard}


def inputs(name: str, *, blocks: tuple[int, ...] = ()) -> ShardingSpec:
    """Shard the matrix `name` by its inputs: the ranks' outputs must be summed."""
    return {f"{name}.weight": Sharded(1, blocks)}
