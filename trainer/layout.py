"""How the processes of a run share its work, and the groups over which they speak.

world = data parallel × context parallel × tensor parallel. Groups exist for all three axes, so
that an operator that learns to be split finds its group here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from ..console.errors import LayoutError

DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Degrees of parallelism. Data parallelism takes what the others leave of the processes."""

    tp: int = 1
    """Tensor parallel: every matrix is split among so many processes."""
    cp: int = 1
    """Context parallel: every row is split among so many processes."""

    def __post_init__(self) -> None:
        for axis in ("tp", "cp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} must be at least 1, not {getattr(self, axis)}")

    def data_parallel(self, processes: int) -> int:
        """The data-parallel degree on so many processes."""
        for axis, words in (("tp", "tensor"), ("cp", "context")):
            degree = getattr(self, axis)
            if degree > 1:
                raise LayoutError(
                    f"layout.{axis}={degree}: no operator of this headrace can be split for "
                    f"{words} parallelism yet",
                    mend=f"set layout.{axis}=1; ZeRO 1–3 and FSDP2 divide memory among "
                    "data-parallel processes (engine.zero=3, or engine.kind=fsdp2)",
                )
        return processes


@dataclass(frozen=True)
class Parallel:
    """This process's place, and its groups."""

    rank: int
    world: int
    dp_rank: int
    dp: int
    device: torch.device
    dp_group: dist.ProcessGroup
    """Gradients and sharded parameters: gloo on CPU, NCCL on GPU."""
    control: dist.ProcessGroup
    """Small facts of a step, in host memory."""
    checkpoint: dist.ProcessGroup
    """The background thread that writes checkpoints."""

    @property
    def first(self) -> bool:
        return self.rank == 0


def choose_device(kind: DeviceKind) -> Literal["cpu", "cuda"]:
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise LayoutError(
            "device=cuda, and torch finds no GPU",
            mend="set device=cpu, or see what `headrace doctor` says",
        )
    return kind


def count_gpus() -> int:
    return torch.cuda.device_count()


def join(layout: LayoutConfig, device: Literal["cpu", "cuda"], timeout: timedelta) -> Parallel:
    """Make the groups. torch.distributed is initialised already."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dp = layout.data_parallel(world)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(place)
    world_group = dist.group.WORLD
    assert world_group is not None
    return Parallel(
        rank=rank,
        world=world,
        dp_rank=rank,
        dp=dp,
        device=place,
        dp_group=world_group,
        control=_host_group(timeout),
        checkpoint=_host_group(timeout),
    )


def _host_group(timeout: timedelta) -> dist.ProcessGroup:
    """All ranks, over host memory."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
