"""Ranks that share the state of a layer under FSDP2: for all layers alike, or for each its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...console.errors import LayoutError, Problem, Problems

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor import DTensor

    from ..layout.config import LayoutConfig
    from ..layout.groups import Parallel
    from .optimizers.base import ParameterGroup

OF_LAYER = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class LayerShards:
    """Neighbouring layers that FSDP2 shards in their own way."""

    layers: tuple[int, int]
    """First and last layer."""
    reshard: bool = True
    """False: their weights stay whole from the forward to the backward pass, with `gather: block`.
    """
    shard: int | None = None
    """Ranks that share one copy of their state. None: those of `engine.shard`."""

    def __post_init__(self) -> None:
        first, last = self.layers
        wrong = []
        if not 0 <= first <= last:
            wrong.append(Problem("layers", f"first and last layer, not {list(self.layers)}"))
        if self.shard is not None and self.shard < 1:
            wrong.append(Problem("shard", f"must be at least 1, not {self.shard}"))
        if wrong:
            raise Problems(wrong)

    def __contains__(self, layer: int) -> bool:
        return self.layers[0] <= layer <= self.layers[1]


def overlapping(spans: Sequence[LayerShards]) -> Iterator[str]:
    """Yield the layers that two spans contain."""
    for one, other in pairwise(sorted(span.layers for span in spans)):
        if one[1] >= other[0]:
            yield f"layer {other[0]} is in {list(one)} and in {list(other)}"


def layer_of(parameter: str) -> int | None:
    """Return the layer that holds a parameter; None for embedding, head and shared blocks."""
    found = OF_LAYER.match(parameter)
    return int(found[1]) if found else None


def shard_of(spans: Sequence[LayerShards], layer: int | None, standard: int | None) -> int | None:
    """Return the ranks that share one copy of a layer's state; `standard` for other layers."""
    own = next((span.shard for span in spans if layer is not None and layer in span), None)
    return own or standard


def check_shard(name: str, shard: int, ranks: int, layout: LayoutConfig) -> None:
    """Raise unless groups of `shard` ranks divide the ranks that share the state, and fit the
    groups that split experts."""
    if ranks % shard:
        raise LayoutError(
            f"{name}={shard} does not divide the {ranks} processes among which the state is "
            "divided (dp × cp)",
            hint=f"choose a divisor of {ranks}, or leave it out to share among all",
        )
    block = shard * layout.tp
    if block % layout.ep and layout.ep % block:
        raise LayoutError(
            f"{name}={shard} × layout.tp={layout.tp} = {block} ranks that share one copy of the "
            f"state, and layout.ep={layout.ep} ranks that split the experts: neither divides the "
            "other",
            hint=f"choose {name} so that one divides the other, or leave it out",
        )


def with_one_mesh(
    group: ParameterGroup, shard_ranks: Callable[[str], int | None]
) -> list[ParameterGroup]:
    """Divide a group by the ranks that share its parameters: torch's fused optimizers take tensors
    of one mesh."""
    alike: dict[int | None, list[str]] = {}
    for name in group.names:
        alike.setdefault(shard_ranks(name), []).append(name)
    return [replace(group, names=tuple(names)) for names in alike.values()]


class ShardGroups:
    """The ranks that share the state of each parameter."""

    def __init__(self, parallel: Parallel, shard: int | None, spans: Sequence[LayerShards]) -> None:
        """Collective: every rank makes the groups of all layers, in one order."""
        ranks, device = parallel.data.size, parallel.device.type
        tensor, split = parallel.axes.tensor.size, parallel.axes.experts.size
        self.spans, self.standard = spans, shard or ranks
        sizes = sorted({self.standard, *(span.shard or self.standard for span in spans)})
        self.dense = {size: Grid(device, ranks, size, tensor) for size in sizes}
        self.experts = self.dense
        if split > 1:
            replicas = parallel.replicas.size
            self.experts = {
                size: Grid(device, replicas, max(1, size * tensor // split), split)
                for size in sizes
            }

    def of(self, layer: int | None, *, experts: bool = False) -> Grid:
        """Return the grid of a layer, or of the parameters of no layer."""
        size = shard_of(self.spans, layer, self.standard)
        assert size is not None
        return (self.experts if experts else self.dense)[size]


class Grid:
    """The ranks that hold one local shard: replicas of the state, each sharded over some ranks."""

    def __init__(self, device: str, ranks: int, shards: int, others: int) -> None:
        """The world is made of blocks of `ranks` × `others` ranks. In a block, `ranks` of them hold
        one local shard; `others` neighbouring ranks hold different ones. Collective."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.shards = shards
        blocks = dist.get_world_size() // (ranks * others)
        shape = (blocks, ranks // shards, shards, others)
        names = ("block", "replica", "shard", "other")
        whole = init_device_mesh(device, shape, mesh_dim_names=names)
        self.mesh: Any = whole["replica", "shard"] if shards < ranks else whole["shard"]
        self.replica: int = whole.get_local_rank("replica")
        self.shard: int = whole.get_local_rank("shard")

    def first_element(self, parameter: nn.Parameter | DTensor) -> int:
        """Return the index of the shard's first element: equal numbers of rows, the last fewer."""
        rows, *rest = parameter.shape
        piece = -(-rows // self.shards)
        return min(piece * self.shard, rows) * math.prod(rest)
