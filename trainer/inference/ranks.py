"""Ranks that compute on rows together: started by torchrun, like those of `trainer eval`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from ...console.errors import LayoutError
from ...models.config.config import ModelConfig
from ...models.model.model import Model
from ...models.parallel.axes import Axes
from ..cluster import ranks
from ..cluster.agreement import run_on_first
from ..layout.config import LayoutConfig
from ..layout.devices import DeviceKind, choose_device, local_device
from ..layout.groups import create_groups
from ..scores.team import TIMEOUT, Team, joined_ranks
from ..weights.sample import load
from ..weights.source import WeightSource

T = TypeVar("T")


def choose_layout(model: ModelConfig, cp: int) -> LayoutConfig:
    """Return the layout in which `cp` ranks share a row: attention by heads, if they divide."""
    heads = [options.attention_heads for options in model.operators.values()]
    divisible = all(not count or count % cp == 0 for count in heads)
    return LayoutConfig(cp=cp, attention="a2a" if divisible else "ring")


def check_ranks(cp: int) -> None:
    """Raise unless `cp` divides the ranks that were started."""
    world = int(os.environ["WORLD_SIZE"]) if ranks.is_rank() else 1
    if world % cp:
        raise LayoutError(
            f"--cp {cp} does not divide {world} process{'es' * (world > 1)}",
            hint=f"start them with torchrun: torchrun --nproc-per-node {cp} $(which trainer) …",
        )


@dataclass(frozen=True)
class RowRanks:
    """This rank among those that share rows."""

    axes: Axes = field(default_factory=Axes)
    group: dist.ProcessGroup | None = None

    def run_on_first(self, act: Callable[[], T]) -> T | None:
        """Return the result of `act` on rank 0, and None on all further ranks. Collective."""
        return act() if self.group is None else run_on_first(act, self.group)

    def load(self, weights: WeightSource, device: DeviceKind) -> Model:
        model = load(weights, device)
        model.shard(self.axes)
        return model

    def team(self, functions: Mapping[str, Callable[[Any], Any]]) -> Team:
        return Team(functions, self.group, members=self.axes.context.size)


@contextlib.contextmanager
def joined_row_ranks(layout: LayoutConfig, device: DeviceKind) -> Iterator[RowRanks]:
    """Join the ranks that were started; `layout.cp` consecutive ranks share each row."""
    check_ranks(layout.cp)
    kind = choose_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    with joined_ranks(backend, local_device(kind)):
        if not dist.is_initialized():
            yield RowRanks()
            return
        parallel = create_groups(layout, kind, TIMEOUT)
        yield RowRanks(parallel.axes, parallel.control)
