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

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .axes import ALONE, Axes, Axis
from .local_shard import LocalShard, Sharded, ShardingSpec


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


def local_part(shard: LocalShard, whole: Tensor) -> Tensor:
    """Slice a local shard out of the whole tensor."""
    if shard.runs is None:
        return whole
    if whole.is_meta:  # torch.cat of meta tensors imports torch._dynamo: 1.5 s
        return whole.new_empty(shard.local)
    pieces = [whole.narrow(shard.dim, run.start, len(run)) for run in shard.runs]
    return torch.cat(pieces, dim=shard.dim)


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
            setattr(holder, leaf, nn.Parameter(local_part(shard, whole.detach())))
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
