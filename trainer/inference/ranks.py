"""Ranks that compute on rows together: started by torchrun, like those of `trainer eval`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ...models.model.model import Model
from ...models.parallel.axes import Axes
from ..cluster.agreement import run_on_first
from ..layout.devices import local_device
from ..layout.groups import Parallel, create_groups
from ..scores.team import TIMEOUT, Team, joined_ranks
from ..weights.source import WeightSource
from .loading import load_model
from .placement import Placement

T = TypeVar("T")


@dataclass(frozen=True)
class RowRanks:
    """This rank among those that share rows and weights."""

    placement: Placement
    parallel: Parallel | None = None
    """None for a single process."""

    @property
    def axes(self) -> Axes:
        return Axes() if self.parallel is None else self.parallel.axes

    def run_on_first(self, act: Callable[[], T]) -> T | None:
        """Return the result of `act` on rank 0, and None on all further ranks. Collective."""
        return act() if self.parallel is None else run_on_first(act, self.parallel.control)

    def load(self, weights: WeightSource) -> Model:
        return load_model(weights, self.placement, self.parallel)

    def team(
        self, functions: Mapping[str, Callable[[Any], Any]], idle: Callable[[Any], object]
    ) -> Team:
        """Return the team that computes batches. Ranks that share weights gather them together:
        one without a batch calls `idle` with that of another."""
        group = None if self.parallel is None else self.parallel.control
        shares_weights = self.placement.shard > 1
        members = self.placement.row_ranks
        return Team(functions, group, members=members, idle=idle if shares_weights else None)


@contextlib.contextmanager
def joined_row_ranks(placement: Placement) -> Iterator[RowRanks]:
    """Join the ranks that were started; consecutive ranks share each row."""
    placement.check_ranks()
    backend = "cpu:gloo,cuda:nccl" if placement.device == "cuda" else "gloo"
    with joined_ranks(backend, local_device(placement.device)):
        parallel = None
        if dist.is_initialized():
            parallel = create_groups(placement.layout, placement.device, TIMEOUT)
        yield RowRanks(placement, parallel)
