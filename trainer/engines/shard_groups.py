"""Choose the ranks over which FSDP2 shards the state, for all layers or by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...console.errors import ConfigProblem, ConfigProblems, LayoutError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor import DTensor

    from ...models.model.block import Block
    from ..layout.config import LayoutConfig
    from ..layout.groups import Parallel
    from .optimizers.base import ParameterGroup

LAYER_NUMBER = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class LayerShards:
    """Sharding of consecutive layers that differs from the other layers'."""

    layers: tuple[int, int]
    """First and last layer."""
    reshard: bool = True
    """False: weights stay unsharded from the forward to the backward pass, with `gather: block`."""
    shard: int | None = None
    """Ranks that share a copy of the state. None: as in `engine.shard`."""

    def __post_init__(self) -> None:
        first, last = self.layers
        problems = []
        if not 0 <= first <= last:
            problems.append(
                ConfigProblem("layers", f"first and last layer, not {list(self.layers)}")
            )
        if self.shard is not None and self.shard < 1:
            problems.append(ConfigProblem("shard", f"must be at least 1, not {self.shard}"))
        if problems:
            raise ConfigProblems(problems)

    def __contains__(self, layer: int) -> bool:
        return self.layers[0] <= layer <= self.layers[1]


def find_overlaps(spans: Sequence[LayerShards]) -> Iterator[str]:
    """Yield a message for every pair of spans that share a layer."""
    for lower, upper in pairwise(sorted(span.layers for span in spans)):
        if lower[1] >= upper[0]:
            yield f"layer {upper[0]} is in {list(lower)} and in {list(upper)}"


def layer_number(parameter: str) -> int | None:
    """Return a parameter's layer; None for embedding, head and shared blocks."""
    match = LAYER_NUMBER.match(parameter)
    return int(match[1]) if match else None


def layer_shard(spans: Sequence[LayerShards], layer: int | None, default: int | None) -> int | None:
    """Return the number of ranks that share a copy of a layer's state; `default` for a layer
    outside the spans."""
    shard = next((span.shard for span in spans if layer is not None and layer in span), None)
    return shard or default


def check_shard(key: str, shard: int, ranks: int, layout: LayoutConfig) -> None:
    """Raise unless groups with `shard` ranks divide the data axis, and fit the groups that split
    experts. `key` is the setting, for messages."""
    if ranks % shard:
        raise LayoutError(
            f"{key}={shard} does not divide the {ranks} processes among which the state is "
            "divided (dp × cp)",
            hint=f"choose a divisor of {ranks}, or leave it out to share among all",
        )
    block = shard * layout.tp
    if block % layout.ep and layout.ep % block:
        raise LayoutError(
            f"{key}={shard} × layout.tp={layout.tp} = {block} ranks that share one copy of the "
            f"state, and layout.ep={layout.ep} ranks that split the experts: neither divides the "
            "other",
            hint=f"choose {key} so that one divides the other, or leave it out",
        )


def split_by_mesh(
    group: ParameterGroup, shard_ranks: Callable[[str], int | None]
) -> list[ParameterGroup]:
    """Split a group by `shard_ranks`, because torch's fused optimizers require a single mesh."""
    names_by_ranks: dict[int | None, list[str]] = {}
    for parameter in group.names:
        names_by_ranks.setdefault(shard_ranks(parameter), []).append(parameter)
    return [replace(group, names=tuple(names)) for names in names_by_ranks.values()]


class ShardGroups:
    """Grids of ranks that share parameters' state."""

    def __init__(self, parallel: Parallel, shard: int | None, spans: Sequence[LayerShards]) -> None:
        """Collective: all ranks create all layers' grids in the same order."""
        dp, device = parallel.data.size, parallel.device.type
        tp, ep = parallel.axes.tensor.size, parallel.axes.experts.size
        self.spans, self.default = spans, shard or dp
        sizes = sorted({self.default, *(span.shard or self.default for span in spans)})
        self.dense = {size: ShardGrid(device, dp, size, tp) for size in sizes}
        self.experts = self.dense
        if ep > 1:
            num_replicas = parallel.replicas.size
            self.experts = {
                size: ShardGrid(device, num_replicas, max(1, size * tp // ep), ep) for size in sizes
            }

    def grid(self, layer: int | None, *, experts: bool = False) -> ShardGrid:
        """Return a layer's grid; None stands for parameters outside layers."""
        size = layer_shard(self.spans, layer, self.default)
        assert size is not None
        return (self.experts if experts else self.dense)[size]


class ShardGrid:
    """Ranks with the same local shard, as replicas × shards of the state."""

    def __init__(self, device: str, ranks: int, shards: int, num_local_shards: int) -> None:
        """The world consists of blocks with `ranks` × `num_local_shards` ranks. In a block, `ranks`
        ranks hold the same local shard, and neighbouring ranks hold different shards.
        Collective."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.shards = shards
        num_blocks = dist.get_world_size() // (ranks * num_local_shards)
        shape = (num_blocks, ranks // shards, shards, num_local_shards)
        names = ("block", "replica", "shard", "local_shard")
        world = init_device_mesh(device, shape, mesh_dim_names=names)
        self.mesh: Any = world["replica", "shard"] if shards < ranks else world["shard"]
        self.replica: int = world.get_local_rank("replica")
        self.shard: int = world.get_local_rank("shard")

    def first_element(self, parameter: nn.Parameter | DTensor) -> int:
        """Return the index of the shard's first element. The last shards may have fewer rows."""
        rows, *row_shape = parameter.shape
        shard_rows = -(-rows // self.shards)
        return min(shard_rows * self.shard, rows) * math.prod(row_shape)


def shard_experts(block: Block, grid: ShardGrid, sharding: dict[str, Any]) -> None:
    """Shard a block's experts over their replicas, and their operators' other modules like the
    block."""
    from torch.distributed.fsdp import fully_shard

    for branch in block.branches():
        if branch.operator.experts:
            for child in branch.operator.children():  # a router: gathered once for both passes
                fully_shard(child, **{**sharding, "reshard_after_forward": False})
            fully_shard(branch.operator, **{**sharding, "mesh": grid.mesh})
