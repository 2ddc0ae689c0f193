"""Ranks that torchrun started: they share rows and weights, or batches of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from ...models.model.model import Model
from ...models.parallel.axes import Axes
from ..cluster.agreement import broadcast_first, run_on_first
from ..layout.devices import local_device
from ..layout.groups import Parallel, create_groups
from ..weights.source import WeightSource
from .loading import load_model
from .placement import Placement
from .team import TIMEOUT, Team, joined_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class RowRanks:
    """This rank among those that share rows and weights."""

    placement: Placement
    parallel: Parallel | None = None
    """None for a single process."""
    sharing: dist.ProcessGroup | None = None
    """The ranks that share a copy of the weights with this one; None: no rank."""

    @property
    def axes(self) -> Axes:
        return Axes() if self.parallel is None else self.parallel.axes

    @property
    def is_first(self) -> bool:
        return self.parallel is None or self.parallel.first

    def run_on_first(self, act: Callable[[], T]) -> T | None:
        """Return the result of `act` on rank 0, and None on all further ranks. Collective."""
        return act() if self.parallel is None else run_on_first(act, self.parallel.control)

    def load(self, weights: WeightSource) -> Model:
        return load_model(weights, self.placement, self.parallel)

    def broadcast(self, act: Callable[[], T]) -> T:
        """Return the result of `act` on rank 0, on all ranks. Collective."""
        if self.parallel is None:
            return act()
        result = run_on_first(act, self.parallel.control)
        return cast(T, broadcast_first(result, self.parallel.control))

    def broadcast_ids(self, ids: Tensor) -> Tensor:
        """Return the ids of the first of the ranks that share the weights, on each of them: none
        may end its passes before the others, which gather weights with it."""
        if self.sharing is not None:
            ids = ids.contiguous()
            dist.broadcast(ids, group=self.sharing, group_src=0)
        return ids

    def team(
        self,
        functions: Mapping[str, Callable[[Any], Any]],
        idle: Callable[[Any], object],
        *,
        joint: Collection[str] = (),
    ) -> Team:
        """Return the team that computes batches. Ranks that share weights gather them together:
        one without a batch calls `idle` with that of another; of the functions `joint`, whose
        batches need unequal numbers of passes, they compute the same batch."""
        group = None if self.parallel is None else self.parallel.control
        placement = self.placement
        members = dict.fromkeys(functions, placement.row_ranks)
        members |= dict.fromkeys(joint, max(placement.row_ranks, placement.shard))
        apart = [name for name in functions if name not in joint and placement.shard > 1]
        return Team(functions, group, members=members, idle=dict.fromkeys(apart, idle))


@contextlib.contextmanager
def joined_row_ranks(placement: Placement) -> Iterator[RowRanks]:
    """Join the ranks that were started; consecutive ranks share each row."""
    placement.check_ranks()
    backend = "cpu:gloo,cuda:nccl" if placement.device == "cuda" else "gloo"
    with joined_ranks(backend, local_device(placement.device)):
        yield place_ranks(placement)


def place_ranks(placement: Placement) -> RowRanks:
    """Create the process groups of the ranks that have joined. Collective."""
    if not dist.is_initialized():
        return RowRanks(placement)
    sharing = None
    parallel = create_groups(placement.layout, placement.device, TIMEOUT)
    if placement.shard > 1 and placement.row_ranks == 1:
        sharing, _ = dist.new_subgroups(placement.shard, timeout=TIMEOUT)
    return RowRanks(placement, parallel, sharing)
