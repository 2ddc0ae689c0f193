"""Process groups: a rank's coordinates, and the ranks with which it communicates.

    ranks = pp × dp × cp × tp

Consecutive ranks are neighbours along the last axis, which communicates most; pipeline stages
communicate least. Ranks that differ along dp or cp alone hold the same shard of the model: they sum
gradients and shard the training state.

Experts are split over the innermost ep ranks of dp × cp × tp, so their axis contains entire tensor
axes. Ranks with the same experts are replicas: they sum the experts' gradients and shard their
state:

    dp 2 × tp 2, ep 2    experts (0 1) (2 3), replicas (0 2) (1 3): each dp rank has all experts
    dp 2 × tp 2, ep 4    experts (0 1 2 3): each rank has a quarter, no replicas
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ...models.parallel.axes import ALONE, Axes, Axis, Holders
from .config import LayoutConfig
from .devices import local_device
from .schedules import Kind, Orders
from .stages import Stages

PP, DP, CP, TP = range(4)
"""Dimensions of the rank grid."""


@dataclass(frozen=True)
class Wire:
    """A directed edge between two stages, for activations or for gradients.

    A wire has a separate process group, so messages arrive in the order of the sender's actions,
    independently of the opposite direction.
    """

    group: dist.ProcessGroup
    peer: int
    """Remote rank."""
    stage: int
    """Remote stage."""


@dataclass(frozen=True)
class Pipe:
    """This rank's pipeline stage and neighbours."""

    layout: LayoutConfig
    stage: int
    sends: Mapping[Kind, Wire]
    receives: Mapping[Kind, Wire]
    last_stage: dist.ProcessGroup
    """Last stage's ranks, which compute the loss; over host memory."""

    @property
    def computes_loss(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def last_chunk(self) -> int:
        return self.layout.all_chunks - 1

    def orders(self, micro_batches: int) -> Orders:
        """Return each stage's passes in a step with so many micro-batches."""
        return self.layout.orders(micro_batches)


@dataclass(frozen=True)
class Parallel:
    """This rank's coordinates and process groups."""

    rank: int
    world: int
    device: torch.device
    batch: Axis
    """dp: ranks that share a global batch's rows."""
    data: Axis
    """dp × cp: ranks that sum gradients and shard the training state. Gloo on CPU, NCCL on GPU."""
    replicas: Axis
    """Ranks with the same experts."""
    pipe: Pipe
    """pp: stages that share the layers."""
    axes: Axes
    """Axes that shard the model itself: tensor, context and experts."""
    control: dist.ProcessGroup
    """All ranks, over host memory: step statistics."""
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
        """True on exactly one of the ranks that read the same tokens: tensor rank 0 on the last
        stage."""
        return self.pipe.computes_loss and self.axes.tensor.rank == 0

    @property
    def reports_rows(self) -> bool:
        """True on the rank that reports row numbers for its data-parallel replica."""
        return self.counts_tokens and self.axes.context.rank == 0


def create_groups(
    layout: LayoutConfig,
    device: Literal["cpu", "cuda"],
    timeout: timedelta,
    shared: Mapping[str, Stages] | None = None,
) -> Parallel:
    """Create the process groups. torch.distributed must be initialised. Collective.

    `shared` maps modules on several stages to these stages (`shared_modules`).
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = layout.data_parallel(world)
    grid = torch.arange(world).view(layout.pp, dp, layout.cp, layout.tp)
    [stage] = (grid == rank).nonzero()[0, :1].tolist()
    by_experts = grid.view(layout.pp, -1, layout.ep)
    data = _axis(grid, [DP, CP], timeout, alone=True)
    control = _host_group(timeout)
    return Parallel(
        rank=rank,
        world=world,
        device=local_device(device),
        batch=_axis(grid, [DP], timeout),
        data=data,
        replicas=data if layout.ep == 1 else _axis(by_experts, [1], timeout, alone=True),
        pipe=_pipe(grid, layout, stage, control, timeout),
        axes=Axes(
            tensor=_axis(grid, [TP], timeout),
            context=_axis(grid, [CP], timeout),
            **layout.row_forms,
            experts=_axis(by_experts, [2], timeout),
            row_parts=_axis(grid, [CP, TP], timeout) if layout.ep > 1 else ALONE,
            shared=_holders(grid, stage, shared or {}, timeout),
        ),
        control=control,
        checkpoint=_host_group(timeout),
    )


def _pipe(
    grid: torch.Tensor,
    layout: LayoutConfig,
    stage: int,
    control: dist.ProcessGroup,
    timeout: timedelta,
) -> Pipe:
    """Create the wires between neighbouring stages. Collective."""
    rank = dist.get_rank()
    sends: dict[Kind, Wire] = {}
    receives: dict[Kind, Wire] = {}
    for kind, source, target in _hops(layout):
        ends = grid[[source, target]].flatten(1).T.tolist()
        for sender, receiver in ends:
            group = _group([sender, receiver], timeout)
            if rank == sender:
                sends[kind] = Wire(group, receiver, target)
            if rank == receiver:
                receives[kind] = Wire(group, sender, source)
    last_stage = control
    if layout.pp > 1:
        last_stage = _group(grid[-1].flatten().tolist(), timeout, "gloo")
    return Pipe(layout, stage, sends, receives, last_stage)


def _hops(layout: LayoutConfig) -> Iterator[tuple[Kind, int, int]]:
    """Yield (kind, sending stage, receiving stage) for messages between stages."""
    for chunk in range(min(layout.pp, layout.all_chunks - 1)):
        stage, next_stage = chunk % layout.pp, (chunk + 1) % layout.pp
        yield "forward", stage, next_stage
        yield "backward", next_stage, stage


def _holders(
    grid: torch.Tensor, stage: int, shared: Mapping[str, Stages], timeout: timedelta
) -> dict[str, Holders]:
    """Return the axes of the ranks that hold this stage's shared modules. Collective."""
    holders: dict[Stages, Holders] = {}
    for stages in sorted(set(shared.values())):
        subgrid = grid[list(stages)]
        sharded = replicated = _axis(subgrid, [PP], timeout)
        if subgrid.shape[TP] > 1:
            replicated = _axis(subgrid, [PP, TP], timeout)
        holders[stages] = Holders(sharded, replicated)
    return {path: holders[stages] for path, stages in shared.items() if stage in stages}


def _axis(grid: torch.Tensor, dims: list[int], timeout: timedelta, *, alone: bool = False) -> Axis:
    """Return the axis of ranks that differ from this rank along `dims` alone. Collective.

    With `alone`, an axis with a single rank has a process group too.
    """
    last = list(range(-len(dims), 0))
    lines = grid.movedim(dims, last).flatten(-len(dims)).flatten(0, -2)
    if lines.shape[1] == 1 and not alone:
        return ALONE
    axis = ALONE
    for line in lines.tolist():
        is_world = len(line) == dist.get_world_size()
        group = dist.group.WORLD if is_world else dist.new_group(line, timeout=timeout)
        if dist.get_rank() in line:
            assert isinstance(group, dist.ProcessGroup)
            axis = Axis(group, line.index(dist.get_rank()), len(line))
    return axis


def _host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Create a gloo group with all ranks."""
    return _group(None, timeout, "gloo")


def _group(
    ranks: Sequence[int] | None, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a group of `ranks`, or of all ranks. Collective; only members may use it."""
    return dist.new_group(ranks, timeout=timeout, backend=backend)  # type: ignore[return-value]
