"""Share the batches of an evaluation among ranks.

    rank 0 ── batches ──► rank r computes batches r, r + n, r + 2n, … ── results ──► rank 0

Batches do not depend on the number of ranks, so neither do the results. Consecutive ranks may
compute each batch together, if they share its rows.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ...console.errors import RunError, UserError
from ...console.progress import Progress
from ..cluster import ranks
from ..cluster.lost_ranks import naming_lost_ranks

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TIMEOUT = timedelta(days=1)
"""Time for rank 0 to read its tasks, while the other ranks wait."""
JOIN = timedelta(minutes=10)
ROUND = 16
"""Batches per rank between two exchanges. An exchange shows progress."""


@contextlib.contextmanager
def joined_ranks(backend: str = "gloo", device: torch.device | None = None) -> Iterator[None]:
    """Join the ranks that torchrun, or any launcher that sets RANK and WORLD_SIZE, has started.
    `device` is this rank's, if the ranks communicate over GPUs."""
    if not ranks.is_rank():
        yield
        return
    with naming_lost_ranks(f"rank {os.environ['RANK']}"):
        ranks.initialise(backend, TIMEOUT, JOIN, device)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Team:
    """Ranks that apply functions to batches. A single process is a team too."""

    def __init__(
        self,
        functions: Mapping[str, Callable[[Any], Any]],
        group: dist.ProcessGroup | None = None,
        *,
        workers: int | None = None,
        members: int | Mapping[str, int] = 1,
        idle: Mapping[str, Callable[[Any], object]] | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """The first `workers` ranks compute (default: all); the remaining ones wait. `members`
        consecutive ranks compute a batch together (an int, or one for each function), and the
        result is that of the first of them.
        `idle` has functions that ranks without a batch left call, with the first batch of a round,
        while further ranks compute: all of them run equally many batches. `beat` is called after
        each batch and each exchange."""
        single = not dist.is_initialized()
        self.functions = functions
        self.group = group
        self.rank = 0 if single else dist.get_rank(group)
        self.size = 1 if single else dist.get_world_size(group)
        self.members = dict.fromkeys(functions, members) if isinstance(members, int) else members
        self.workers = min(self.size, workers or self.size)
        self.idle = idle or {}
        self.beat = beat

    def lead(self, act: Callable[[], T]) -> T | None:
        """Return on rank 0 the result of `act`, which may call `map_batches`; None on all further
        ranks, which compute meanwhile. Collective."""
        if self.rank:
            while (task := self._broadcast_task(None)) is not None:
                self._compute(*task)
            return None
        try:
            return act()
        finally:
            self._broadcast_task(None)

    def map_batches(
        self, function: str, batches: Sequence[Sequence[Any]], label: str, unit: str
    ) -> list[Any]:
        """Return the results by batch, on rank 0. `label` and `unit` are shown as progress."""
        results: list[Any] = []
        with Progress(label, total=sum(map(len, batches)), unit=unit) as progress:
            num_batches = self.round_batches(function)
            for start in range(0, len(batches), num_batches):
                round_batches = batches[start : start + num_batches]
                results += self.map_round(function, round_batches)
                progress.advance(sum(map(len, round_batches)))
        return results

    def replicas(self, function: str) -> int:
        """Return the number of groups of ranks that compute batches."""
        return self.workers // self.members[function]

    def round_batches(self, function: str) -> int:
        """Return the number of batches between two exchanges."""
        return self.replicas(function) * ROUND if self.size > 1 else 1

    def map_round(self, function: str, batches: Sequence[Any]) -> list[Any]:
        """Return the results by batch, on rank 0, after one exchange."""
        self._broadcast_task((function, batches))
        return self._compute(function, batches)

    def _broadcast_task(self, task: Any) -> Any:
        """Return rank 0's task on all ranks."""
        self.beat()
        if self.size == 1:
            return task
        tasks = [task]
        with naming_lost_ranks(f"rank {self.rank}"):
            dist.broadcast_object_list(tasks, group=self.group, group_src=0)
        return tasks[0]

    def _compute(self, function: str, batches: Sequence[Any]) -> list[Any]:
        """Compute this rank's batches. Return all ranks' results in order, on rank 0."""
        members, replicas = self.members[function], self.replicas(function)
        idle = self.idle.get(function)
        replica = self.rank // members
        local_batches = batches[replica::replicas] if replica < replicas else []
        local: list[Any] | UserError = []
        try:
            local = [self._apply(function, batch) for batch in local_batches]
            if idle is not None and len(local) < -(-len(batches) // replicas):
                idle(batches[0])
        except Exception as error:  # raised on rank 0: the other ranks must not wait for ever
            local = error if isinstance(error, UserError) else self._unexpected_error(error)
            if members > 1 or idle is not None:
                # Further ranks may wait in the midst of the batch for this one.
                raise local from error
        gathered: list[Any] = [local]
        if self.size > 1:
            gathered = [None] * self.size
            with naming_lost_ranks(f"rank {self.rank}"):
                dist.gather_object(
                    local, None if self.rank else gathered, group=self.group, group_dst=0
                )
        if self.rank:
            return []
        for results in gathered:
            if isinstance(results, UserError):
                raise results
        return [
            gathered[number % replicas * members][number // replicas]
            for number in range(len(batches))
        ]

    def _apply(self, function: str, batch: Any) -> Any:
        result = self.functions[function](batch)
        self.beat()
        return result

    def _unexpected_error(self, error: Exception) -> RunError:
        return RunError(
            f"rank {self.rank} failed: {error!r}", where="\n" + traceback.format_exc().rstrip()
        )
