"""The ranks over which FSDP2 shards weights, gradients and optimizer state, by layer.

Ranks that share one copy of a layer's state hold one shard each. With fewer of them than
data-parallel ranks, there are several copies: replicas (HSDP). tp and ep cut parameters first: what
is sharded here is a rank's local shard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
    """Settings of consecutive layers that are sharded unlike the others."""

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
    """Yield a message for each span that begins before its predecessor ends."""
    for lower, upper in pairwise(sorted(span.layers for span in spans)):
        if lower[1] >= upper[0]:
            yield f"layer {upper[0]} is in {list(lower)} and in {list(upper)}"


@cache
def parse_layer_number(parameter: str) -> int | None:
    """Return the layer in a parameter's name; None for embedding, head and shared blocks."""
    match = LAYER_NUMBER.match(parameter)
    return int(match[1]) if match else None


def choose_shard_ranks(
    spans: Sequence[LayerShards], layer: int | None, default: int | None
) -> int | None:
    """Return how many ranks share a copy of a layer's state: `default` outside the spans, and for
    parameters outside layers (None)."""
    shard = next((span.shard for span in spans if layer is not None and layer in span), None)
    return shard or default


def check_shard_ranks(key: str, shard_ranks: int, data_ranks: int, layout: LayoutConfig) -> None:
    """Raise LayoutError unless `shard_ranks` divides the dp × cp data ranks, and the ranks with a
    copy of the state form whole groups of experts, or parts of one. `key` is the setting's name."""
    if data_ranks % shard_ranks:
        raise LayoutError(
            f"{key}={shard_ranks} does not divide the {data_ranks} processes among which the state "
            "is divided (dp × cp)",
            hint=f"choose a divisor of {data_ranks}, or leave it out to share among all",
        )
    copy_ranks = shard_ranks * layout.tp
    if copy_ranks % layout.ep and layout.ep % copy_ranks:
        raise LayoutError(
            f"{key}={shard_ranks} × layout.tp={layout.tp} = {copy_ranks} ranks that share one copy "
            f"of the state, and layout.ep={layout.ep} ranks that split the experts: neither "
            "divides the other",
            hint=f"choose {key} so that one divides the other, or leave it out",
        )


def split_by_mesh(
    group: ParameterGroup, shard_ranks: Callable[[str], int | None]
) -> list[ParameterGroup]:
    """Split an optimizer's group by `shard_ranks(parameter)`: torch's fused optimizers require that
    all parameters of a group have one mesh."""
    names_by_ranks: dict[int | None, list[str]] = {}
    for parameter in group.names:
        names_by_ranks.setdefault(shard_ranks(parameter), []).append(parameter)
    return [replace(group, names=tuple(names)) for names in names_by_ranks.values()]


class ShardGroups:
    """The grid of ranks for each layer: one for experts, one for all other parameters."""

    def __init__(self, parallel: Parallel, shard: int | None, spans: Sequence[LayerShards]) -> None:
        """Collective: all ranks create the grids of all layers in the same order."""
        device, dp = parallel.device.type, parallel.data.size
        tp, ep = parallel.axes.tensor.size, parallel.axes.experts.size
        self.spans, self.default = spans, shard or dp
        shard_ranks = sorted({self.default, *(span.shard or self.default for span in spans)})
        self.dense = {ranks: ShardGrid(device, dp, ranks, tp) for ranks in shard_ranks}
        self.experts = self.dense
        if ep > 1:
            # The ranks × tp ranks with a copy of the state hold ep different sets of experts, so
            # each set is cut into ranks · tp / ep shards.
            num_replicas = parallel.replicas.size
            self.experts = {
                ranks: ShardGrid(device, num_replicas, max(1, ranks * tp // ep), ep)
                for ranks in shard_ranks
            }

    def grid(self, layer: int | None, *, experts: bool = False) -> ShardGrid:
        """Return a layer's grid; None stands for parameters outside layers."""
        shard_ranks = choose_shard_ranks(self.spans, layer, self.default)
        assert shard_ranks is not None
        return (self.experts if experts else self.dense)[shard_ranks]


class ShardGrid:
    """Ranks with equal local shards, as replicas × shards.

    4 data ranks, 2 ranks per copy, tp 2:

        rank           0 1 2 3 4 5 6 7
        local shard    0 1 0 1 0 1 0 1    cut by tp (or, for experts, by ep)
        shard          0 0 1 1 0 0 1 1    cut of a local shard by FSDP2
        replica        0 0 0 0 1 1 1 1
    """

    mesh: Any
    """Mesh for `fully_shard`: (replica, shard), or (shard) without replicas."""
    replica: int
    shard: int
    """This rank's place in the grid."""

    def __init__(
        self, device: str, data_ranks: int, shard_ranks: int, num_local_shards: int
    ) -> None:
        """`data_ranks` ranks of a pipeline stage have equal local shards. Collective."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.shard_ranks = shard_ranks
        num_stages = dist.get_world_size() // (data_ranks * num_local_shards)
        shape = (num_stages, data_ranks // shard_ranks, shard_ranks, num_local_shards)
        names = ("stage", "replica", "shard", "local_shard")
        world = init_device_mesh(device, shape, mesh_dim_names=names)
        self.mesh = world["replica", "shard"] if shard_ranks < data_ranks else world["shard"]
        self.replica = world.get_local_rank("replica")
        self.shard = world.get_local_rank("shard")

    def first_element(self, parameter: nn.Parameter | DTensor) -> int:
        """Return where this rank's shard begins in the flattened local shard, in elements. FSDP2
        cuts rows: if they do not divide evenly, the last shards have fewer, or none."""
        rows, *row_shape = parameter.shape
        rows_per_shard = -(-rows // self.shard_ranks)
        return min(rows_per_shard * self.shard, rows) * math.prod(row_shape)


def shard_experts(block: Block, grid: ShardGrid, sharding: dict[str, Any]) -> None:
    """Shard the operators with experts over the ranks of `grid`. `sharding` has the block's
    arguments for `fully_shard`."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    for branch in block.branches():
        if branch.operator.experts:
            # Children have no experts, and keep the block's mesh. A router is small: one gather
            # serves both passes. A shared expert is gathered again, as its block.
            for child in branch.operator.children():
                small = {"reshard_after_forward": False} if isinstance(child, nn.Linear) else {}
                fully_shard(child, **{**sharding, **small})
            fully_shard(branch.operator, **{**sharding, "mesh": grid.mesh})
