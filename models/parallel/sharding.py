"""Sharding of parameters over the tensor-parallel axis and of experts over theirs, and copies.

Each operator returns a sharding spec for its parameters. A parameter without one is replicated on
all ranks, and its gradients are summed over them. So are those of a module that several stages of a
pipeline hold.

    Sharded(0)               rows; each rank has a contiguous part
    Sharded(0, (q, k, v))    rows of several blocks, one after the other: each rank has a part of
                             each block

Under expert parallelism, a rank has whole experts instead: parts of dimension 0.

From the specs follow which slices of a whole tensor a rank holds, where they lie in a checkpoint,
and which gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .axes import ALONE, Axes, Axis


@dataclass(frozen=True)
class Sharded:
    """Each rank has a part of dimension `dim`; or, given `blocks`, a part of each block."""

    dim: int
    blocks: tuple[int, ...] = ()
    """Sizes of the blocks that make up the dimension; empty for one block."""

    def runs(self, size: int, axis: Axis) -> tuple[range, ...]:
        """Indices along the dimension that this rank holds."""
        sizes = self.blocks or (size,)
        assert sum(sizes) == size, "the blocks make up the dimension"
        starts = accumulate(sizes, initial=0)
        parts = [axis.part_range(block) for block in sizes]
        return tuple(
            range(start + part.start, start + part.stop)
            for start, part in zip(starts, parts, strict=False)
        )


ShardingSpec = Mapping[str, Sharded]
"""Shards by the parameter's name, relative to the module that returns the spec."""


@runtime_checkable
class Shardable(Protocol):
    def sharding_spec(self, ranks: int) -> ShardingSpec:
        """Return how parameters are sharded over this number of tensor-parallel ranks."""


@runtime_checkable
class HasExperts(Protocol):
    experts: tuple[str, ...]
    """Parameters whose dimension 0 counts experts, by name relative to the module."""


@runtime_checkable
class Resizable(Protocol):
    """A module whose attributes depend on the sizes of its local shards."""

    def resize(self, axis: Axis) -> None:
        """Update the attributes after the parameters were sharded."""


@dataclass(frozen=True)
class LocalShard:
    """Local shard of one parameter: the part that this rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int = 0
    runs: tuple[range, ...] | None = None
    """Indices along `dim` that this rank holds, in this order; None: all."""
    copies: Axis = ALONE
    """Ranks that hold the same parameter, each with a part of its gradient. The gradient is their
    sum; the first of them counts it in the norm and writes it to checkpoints."""
    experts: bool = False
    """True if the ranks of the experts' axis hold different parts: then only replicas of the
    experts, not all data-parallel ranks, sum gradients and shard the state."""

    @property
    def stored(self) -> bool:
        """True on the rank of `copies` that counts and writes the parameter."""
        return self.copies.rank == 0

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the local shard."""
        if self.runs is None:
            return self.shape
        size = sum(map(len, self.runs))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """Slice the local shard out of the whole tensor."""
        if self.runs is None:
            return whole
        if whole.is_meta:  # torch.cat of meta tensors imports torch._dynamo: 1.5 s
            return whole.new_empty(self.local)
        pieces = [whole.narrow(self.dim, run.start, len(run)) for run in self.runs]
        return torch.cat(pieces, dim=self.dim)


def filters(names: Iterable[str], groups: int, ranks: int, dim: int = 0) -> ShardingSpec:
    """Shard the parameters of filters that neighbouring channels share, if the ranks divide the
    filters evenly."""
    return dict.fromkeys(names, Sharded(dim)) if groups % ranks == 0 else {}


def shard_parameters(model: nn.Module, axes: Axes) -> dict[str, LocalShard]:
    """Keep this rank's local shard of each parameter. Return the shards by parameter name.

    The model must hold whole parameters, or be on the meta device.
    """
    axis = axes.tensor
    shards = {
        name: LocalShard(tuple(p.shape), copies=axes.holders(name).whole)
        for name, p in model.named_parameters()
    }
    axis = axes.tensor
    for path, module in list(model.named_modules()):
        own = expert_spec(module) if axes.experts.size > 1 else {}
        for name, spec in (own or tensor_spec(module, axis)).items():
            owner, _, leaf = name.rpartition(".")
            holder = module.get_submodule(owner)
            whole = getattr(holder, leaf)
            if whole is None:
                continue
            full = f"{path}.{name}" if path else name
            runs = spec.runs(whole.shape[spec.dim], axes.experts if own else axis)
            copies = ALONE if own else axes.holders(full).sharded
            shard = LocalShard(tuple(whole.shape), spec.dim, runs, copies, experts=bool(own))
            shards[full] = shard
            setattr(holder, leaf, nn.Parameter(shard.take(whole.detach())))
    for module in model.modules() if axis.size > 1 else ():
        if isinstance(module, Resizable):
            module.resize(axis)
    return shards


def expert_spec(module: nn.Module) -> ShardingSpec:
    """Return how expert parallelism shards the module's own parameters."""
    names = module.experts if isinstance(module, HasExperts) else ()
    return dict.fromkeys(names, Sharded(0))


def tensor_spec(module: nn.Module, axis: Axis) -> ShardingSpec:
    """Return how tensor parallelism shards the module's own parameters."""
    if axis.size == 1 or not isinstance(module, Shardable):
        return {}
    return module.sharding_spec(axis.size)
