"""Process groups of a run: this rank's coordinates, and the ranks that it communicates with.

    ranks = dp × cp × tp

Neighbouring ranks are neighbours along the last axis, which communicates most. Ranks that differ
along dp or cp alone hold the same shard of the model: they sum gradients and shard the training
state.

Experts are split over the innermost ep ranks of dp × cp × tp, so their axis contains whole tensor
axes. The ranks that hold the same experts are replicas, which sum the gradients of experts and
shard their state:

    dp 2 × tp 2, ep 2    experts (0 1) (2 3), replicas (0 2) (1 3): each dp rank has all experts
    dp 2 × tp 2, ep 4    experts (0 1 2 3): each rank has a quarter, no replicas
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ...models.parallel.axes import ALONE, Axes, Axis
from .config import LayoutConfig


@dataclass(frozen=True)
class Parallel:
    """This rank's coordinates and process groups."""

    rank: int
    world: int
    device: torch.device
    batch: Axis
    """dp: ranks that share the rows of a global batch."""
    data: Axis
    """dp × cp: ranks that sum gradients and shard the training state. Gloo on CPU, NCCL on GPU."""
    replicas: Axis
    """Ranks that hold the same experts."""
    axes: Axes
    """Axes that shard the model itself: tensor, context and experts."""
    control: dist.ProcessGroup
    """All ranks, over host memory: statistics of a step."""
    checkpoint: dist.ProcessGroup
    """All ranks, over host memory: the background thread that writes checkpoints."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def dp(self) -> int:
        return self.batch.size

    @property
    def dp_rank(self) -> int:
        return self.batch.rank

    @property
    def counts_tokens(self) -> bool:
        """True on one rank of the tensor axis, whose ranks hold the same tokens."""
        return self.axes.tensor.rank == 0

    @property
    def reports_rows(self) -> bool:
        """True on one rank of each data-parallel replica, which reports the row numbers."""
        return self.counts_tokens and self.axes.context.rank == 0


def join(layout: LayoutConfig, device: Literal["cpu", "cuda"], timeout: timedelta) -> Parallel:
    """Create the process groups. torch.distributed must be initialised."""
    rank, world = dist.get_rank(), dist.get_world_size()
    grid = torch.arange(world).view(layout.data_parallel(world), layout.cp, layout.tp)
    dp, cp, tp = range(3)
    data = _axis(grid, [dp, cp], timeout, alone=True)
    by_experts = grid.view(-1, layout.ep)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(place)
    return Parallel(
        rank=rank,
        world=world,
        device=place,
        batch=_axis(grid, [dp], timeout),
        data=data,
        replicas=data if layout.ep == 1 else _axis(by_experts, [0], timeout, alone=True),
        axes=Axes(
            tensor=_axis(grid, [tp], timeout),
            context=_axis(grid, [cp], timeout),
            attention=layout.attention,
            hyena_li=layout.hyena_li,
            experts=_axis(by_experts, [1], timeout),
            parts=_axis(grid, [cp, tp], timeout) if layout.ep > 1 else ALONE,
        ),
        control=_host_group(timeout),
        checkpoint=_host_group(timeout),
    )


def _axis(grid: torch.Tensor, dims: list[int], timeout: timedelta, *, alone: bool = False) -> Axis:
    """Return the axis of the ranks that differ from this one along `dims` alone. Collective.

    With `alone`, an axis of one rank has a process group too.
    """
    last = list(range(-len(dims), 0))
    lines = grid.movedim(dims, last).flatten(-len(dims)).flatten(0, -2)
    if lines.shape[1] == 1 and not alone:
        return ALONE
    axis = ALONE
    for line in lines.tolist():
        whole = len(line) == dist.get_world_size()
        group = dist.group.WORLD if whole else dist.new_group(line, timeout=timeout)
        if dist.get_rank() in line:
            assert isinstance(group, dist.ProcessGroup)
            axis = Axis(group, line.index(dist.get_rank()), len(line))
    return axis


def _host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Create a gloo group of all ranks."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
