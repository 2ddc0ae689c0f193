"""Parameter sharding over the tensor axis and, for experts, over the expert axis; replication.

Each operator returns a sharding spec for its parameters. Parameters without a spec are replicated
on all ranks, and their gradients are summed. The same holds for modules on several pipeline stages.

    Sharded(0)               rows; each rank has a contiguous slice
    Sharded(0, (q, k, v))    rows of concatenated blocks; each rank has a slice of each block

Under expert parallelism, a rank has whole experts instead: slices along dimension 0.

The specs determine a rank's slices of an unsharded tensor, their position in a checkpoint, and
which gradients are summed.
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
        """Return how parameters are sharded over `ranks` tensor-parallel ranks."""


@runtime_checkable
class HasExperts(Protocol):
    experts: tuple[str, ...]
    """Parameters whose dimension 0 is the expert, by name relative to the module."""


@runtime_checkable
class Resizable(Protocol):
    """Module with attributes that depend on local shards' sizes."""

    def resize(self, axis: Axis) -> None:
        """Update the attributes after parameters were sharded."""


def slice_local_shard(shard: LocalShard, tensor: Tensor) -> Tensor:
    """Slice a local shard from the unsharded tensor."""
    if shard.runs is None:
        return tensor
    if tensor.is_meta:  # torch.cat of meta tensors imports torch._dynamo: 1.5 s
        return tensor.new_empty(shard.local)
    slices = [tensor.narrow(shard.dim, run.start, len(run)) for run in shard.runs]
    return torch.cat(slices, dim=shard.dim)


def shard_parameters(model: nn.Module, axes: Axes) -> dict[str, LocalShard]:
    """Replace each parameter by this rank's local shard. Return the shards by parameter name.

    The model must hold unsharded parameters, or be on the meta device.
    """
    axis = axes.tensor
    shards = {
        name: LocalShard(tuple(parameter.shape), copies=axes.holders(name).replicated)
        for name, parameter in model.named_parameters()
    }
    for path, module in list(model.named_modules()):
        expert_shards = get_expert_spec(module) if axes.experts.size > 1 else {}
        for name, sharded in (expert_shards or get_tensor_spec(module, axis)).items():
            owner, _, leaf = name.rpartition(".")
            holder = module.get_submodule(owner)
            parameter = getattr(holder, leaf)
            if parameter is None:
                continue
            full_name = f"{path}.{name}" if path else name
            runs = sharded.runs(
                parameter.shape[sharded.dim], axes.experts if expert_shards else axis
            )
            copies = ALONE if expert_shards else axes.holders(full_name).sharded
            shard = LocalShard(
                tuple(parameter.shape), sharded.dim, runs, copies, experts=bool(expert_shards)
            )
            shards[full_name] = shard
            setattr(holder, leaf, nn.Parameter(slice_local_shard(shard, parameter.detach())))
    for module in model.modules() if axis.size > 1 else ():
        if isinstance(module, Resizable):
            module.resize(axis)
    return shards


def get_expert_spec(module: nn.Module) -> ShardingSpec:
    """Return a module's sharding spec under expert parallelism."""
    names = module.experts if isinstance(module, HasExperts) else ()
    return dict.fromkeys(names, Sharded(0))


def get_tensor_spec(module: nn.Module, axis: Axis) -> ShardingSpec:
    """Return a module's sharding spec under tensor parallelism."""
    if axis.size == 1 or not isinstance(module, Shardable):
        return {}
    return module.sharding_spec(axis.size)
