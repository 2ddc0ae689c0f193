"""How the processes of a run share its work, and the groups over which they speak.

    processes = dp × cp × tp        data parallel × context parallel × tensor parallel

Neighbouring ranks are neighbours along the last axis, which speaks most. Processes that differ
along dp or cp alone have the same part of the model: they sum their gradients and divide its
state. (Pipeline parallelism would be one more axis in front; expert parallelism, one within dp.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ...console.errors import LayoutError
from ...models.parallel.axes import ALONE, AttentionForm, Axes, Axis, LongFilterForm

DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Degrees of parallelism. Data parallelism takes what the others leave of the processes."""

    tp: int = 1
    """Tensor parallel: every matrix is split among so many processes."""
    cp: int = 1
    """Context parallel: every row is split among so many processes."""
    attention: AttentionForm = "a2a"
    """How attention sees a row that is split: `a2a` gives each process whole rows of some heads,
    `ring` passes keys and values round."""
    hyena_li: LongFilterForm = "states"
    """How a modal filter of Hyena-LI does: `states` passes what a part leaves behind to the next,
    `a2a` gives each process whole rows of some channels."""

    def __post_init__(self) -> None:
        for axis in ("tp", "cp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} must be at least 1, not {getattr(self, axis)}")

    def data_parallel(self, processes: int) -> int:
        """The data-parallel degree on so many processes."""
        model = self.tp * self.cp
        if processes % model:
            raise LayoutError(
                f"layout.tp={self.tp} × layout.cp={self.cp} does not divide {processes} process"
                f"{'es' * (processes > 1)}",
                hint=f"use processes={model} or a multiple of it, or a smaller layout",
            )
        return processes // model


@dataclass(frozen=True)
class Parallel:
    """This process's place, and its groups."""

    rank: int
    world: int
    device: torch.device
    batch: Axis
    """dp: the rows of a batch are divided."""
    data: Axis
    """dp × cp: gradients are summed, and the state is divided. Gloo on CPU, NCCL on GPU."""
    axes: Axes
    """What divides the model itself."""
    control: dist.ProcessGroup
    """Small facts of a step, in host memory."""
    checkpoint: dist.ProcessGroup
    """The background thread that writes checkpoints."""

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
    def counted(self) -> bool:
        """Whether this process's tokens are counted: along the tensor axis all have the same."""
        return self.axes.tensor.rank == 0

    @property
    def tells(self) -> bool:
        """Whether this process tells which rows it has: those that share a model's parts have the
        same."""
        return self.counted and self.axes.context.rank == 0


def choose_device(kind: DeviceKind) -> Literal["cpu", "cuda"]:
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise LayoutError(
            "device=cuda, and torch finds no GPU",
            hint="set device=cpu, or see what `headrace doctor` says",
        )
    return kind


def count_gpus() -> int:
    return torch.cuda.device_count()


def join(layout: LayoutConfig, device: Literal["cpu", "cuda"], timeout: timedelta) -> Parallel:
    """Make the groups. torch.distributed is initialised already."""
    rank, world = dist.get_rank(), dist.get_world_size()
    grid = torch.arange(world).view(layout.data_parallel(world), layout.cp, layout.tp)
    dp, cp, tp = range(3)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(place)
    return Parallel(
        rank=rank,
        world=world,
        device=place,
        batch=_axis(grid, [dp], timeout),
        data=_axis(grid, [dp, cp], timeout, alone=True),
        axes=Axes(
            tensor=_axis(grid, [tp], timeout),
            context=_axis(grid, [cp], timeout),
            attention=layout.attention,
            hyena_li=layout.hyena_li,
        ),
        control=_host_group(timeout),
        checkpoint=_host_group(timeout),
    )


def _axis(grid: torch.Tensor, dims: list[int], timeout: timedelta, *, alone: bool = False) -> Axis:
    """The processes that differ from this one along `dims` alone; collective. `alone` makes a
    group of one as well, for who must have a group."""
    last = list(range(-len(dims), 0))
    lines = grid.movedim(dims, last).flatten(-len(dims)).flatten(0, -2)
    if lines.shape[1] == 1 and not alone:
        return ALONE
    found = ALONE
    for line in lines.tolist():
        whole = len(line) == dist.get_world_size()
        group = dist.group.WORLD if whole else dist.new_group(line, timeout=timeout)
        if dist.get_rank() in line:
            assert isinstance(group, dist.ProcessGroup)
            found = Axis(group, line.index(dist.get_rank()), len(line))
    return found


def _host_group(timeout: timedelta) -> dist.ProcessGroup:
    """All ranks, over host memory."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
