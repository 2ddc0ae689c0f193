"""Projections at the two ends of an operator: several named ones of one input, and the output.

`models/fp8.py` chooses those whose products run in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.fp8 import Quantized
from ..parallel.axes import Axis
from ..parallel.sharding import Sharded, ShardingSpec
from .fp8 import fp8_linear


class SplitLinear(nn.Module):
    """Returns one tensor for each part: `q, k, v = SplitLinear(d, {"q": d, "k": d, "v": d})(x)`.

    `parts` names the rows of the weight, so that tensor parallelism can shard each part
    separately and conversion can extract it. The parts `wide`, the last ones, never run in FP8.
    """

    fp8: bool = False
    axis: str = ""
    """Name of the tensor-parallel axis, whose ranks share the outputs."""

    def __init__(
        self,
        width: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        wide: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        self.wide = wide
        assert wide == tuple(parts)[len(parts) - len(wide) :]
        size = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(size, width))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(
        self, x: Tensor, stored: Quantized | None = None, *, joined: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """`stored` is x in FP8, if a kernel stored it. `joined` returns the parts concatenated, for
        kernels that take them so. (ZeRO-3 gathers weights at a module's call, so nothing else may
        read them.)"""
        if self.fp8:
            rows, given = self.narrow_rows(), stored or (None, None)
            y = fp8_linear(x, *given, self.weight, self.bias, rows, "", self.axis)
        else:
            y = F.linear(x, self.weight, self.bias)
        return y if joined else torch.split(y, list(self.parts.values()), dim=-1)

    def narrow_rows(self) -> int:
        """Return the number of rows that may run in FP8; they are the first."""
        return sum(size for name, size in self.parts.items() if name not in self.wide)

    def resize(self, axis: Axis) -> None:
        self.axis = axis.name
        self.parts = {name: len(axis.part_range(size)) for name, size in self.parts.items()}


class OutputLinear(nn.Linear):
    """The projection back to the residual stream.

    Under tensor parallelism each rank has some of the inputs, and the ranks' outputs are summed:
    each rank adds bias / ranks.
    """

    fp8: bool = False
    ranks: int = 1
    axis: str = ""
    """Name of the tensor-parallel axis, whose ranks share the inputs."""

    def forward(self, x: Tensor, stored: Quantized | None = None) -> Tensor:
        """`stored` is x in FP8, if a kernel stored it."""
        bias = self.bias if self.bias is None or self.ranks == 1 else self.bias / self.ranks
        if self.fp8:
            rows, given = self.narrow_rows(), stored or (None, None)
            y: Tensor = fp8_linear(x, *given, self.weight, bias, rows, self.axis, "")
            return y
        return F.linear(x, self.weight, bias)

    @property
    def takes_stored(self) -> bool:
        """True if a kernel may store the input in FP8: its rows are whole on this rank."""
        return self.fp8 and self.ranks == 1

    def narrow_rows(self) -> int:
        """Return the number of rows that may run in FP8."""
        return self.out_features

    def resize(self, axis: Axis) -> None:
        self.ranks, self.axis = axis.size, axis.name


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
