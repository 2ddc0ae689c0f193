"""Which part of every parameter a process of the tensor axis has.

Each operator says how its parameters are divided. A parameter of which nothing is said belongs
to all processes, and its gradients are summed over them.

    Cut(0)                   rows; a process has a contiguous part
    Cut(0, (q, k, v))        rows of several things, one behind the other: a part of each

From these follow what a process takes of a whole tensor, where its part lies in a checkpoint,
and which gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..layers.linear import OutputLinear, SplitLinear
from .axes import ALONE, Axis


@dataclass(frozen=True)
class Shard:
    """A process has a part along `dim`; of each of `parts`, whose sizes they are, if given."""

    dim: int
    parts: tuple[int, ...] = ()

    def runs(self, size: int, axis: Axis) -> tuple[range, ...]:
        """The indices along the dimension that are this process's."""
        sizes = self.parts or (size,)
        assert sum(sizes) == size, "the parts make up the dimension"
        begins = accumulate(sizes, initial=0)
        shares = [axis.share(part) for part in sizes]
        return tuple(
            range(begin + share.start, begin + share.stop)
            for begin, share in zip(begins, shares, strict=False)
        )


ShardingSpec = Mapping[str, Shard]
"""By the parameter's name, as seen from the module that says it."""


@runtime_checkable
class Shardable(Protocol):
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """How the parameters are divided among so many."""


@dataclass(frozen=True)
class LocalShard:
    """What a process has of one parameter."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int = 0
    runs: tuple[range, ...] | None = None
    """The indices along `dim` that are here, in this order; None: all."""
    copies: Axis = ALONE
    """The ranks that hold the same parameter, each with a part of its gradient. Its gradient is
    their sum; the first of them counts it in the norm and stores it."""

    @property
    def stored(self) -> bool:
        """True on the one rank of `copies` that counts and stores the parameter."""
        return self.copies.rank == 0

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of what is here."""
        if self.runs is None:
            return self.shape
        here = sum(map(len, self.runs))
        return (*self.shape[: self.dim], here, *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        if self.runs is None:
            return whole
        pieces = [whole.narrow(self.dim, run.start, len(run)) for run in self.runs]
        return torch.cat(pieces, dim=self.dim)


def outputs(name: str, linear: nn.Linear | SplitLinear, *, blocks: int = 1) -> ShardingSpec:
    """The matrix `name` is divided by what comes out of it, each of its parts by itself; where a
    part consists of so many blocks, each of these."""
    sizes = [len(linear.weight)]
    if isinstance(linear, SplitLinear):
        sizes = list(linear.parts.values())
    cut = Shard(0, tuple(size // blocks for size in sizes for _ in range(blocks)))
    return {f"{name}.weight": cut, f"{name}.bias": cut}


def inputs(name: str, *, parts: tuple[int, ...] = ()) -> ShardingSpec:
    """The matrix `name` is divided by what goes into it: what comes out is to be summed."""
    return {f"{name}.weight": Shard(1, parts)}


def filters(name: str, groups: int, processes: int) -> ShardingSpec:
    """Filters that neighbouring channels share are divided where the processes divide them."""
    return {name: Shard(0)} if groups % processes == 0 else {}


def shard_parameters(model: nn.Module, axis: Axis) -> dict[str, LocalShard]:
    """Keep this process's part of every parameter. Returns the parts, by the parameters' names.

    The model holds its whole parameters before, or stands on the meta device.
    """
    parts = {
        name: LocalShard(tuple(p.shape), copies=axis if axis.size > 1 else ALONE)
        for name, p in model.named_parameters()
    }
    if axis.size == 1:
        return parts
    for path, module in list(model.named_modules()):
        if not isinstance(module, Shardable):
            continue
        assert isinstance(module, nn.Module)
        for name, rule in module.sharding_spec(axis.size).items():
            owner, _, leaf = name.rpartition(".")
            holder = module.get_submodule(owner)
            whole = getattr(holder, leaf)
            if whole is None:
                continue
            runs = rule.runs(whole.shape[rule.dim], axis)
            part = LocalShard(tuple(whole.shape), rule.dim, runs)
            parts[f"{path}.{name}" if path else name] = part
            setattr(holder, leaf, nn.Parameter(part.take(whole.detach())))
    for module in model.modules():
        if isinstance(module, SplitLinear):
            module.parts = {name: len(axis.share(size)) for name, size in module.parts.items()}
        elif isinstance(module, OutputLinear):
            module.processes = axis.size
    return parts
