"""Ranks that share the batches of an evaluation.

    rank 0 asks ── batches ──► each rank computes every n-th one ── results ──► rank 0

Batches are those of one process, and so are the results.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ...console.errors import RunError, UserError
from ...console.progress import Progress
from ..cluster import ranks
from ..cluster.lost_ranks import naming_lost_ranks

T = TypeVar("T")

TIMEOUT = timedelta(days=1)
"""Time for rank 0 to read its tasks, while the other ranks wait."""
JOIN = timedelta(minutes=10)
ROUND = 16
"""Batches of a rank between two exchanges: each is a sign of progress."""


@contextlib.contextmanager
def joined_ranks() -> Iterator[None]:
    """Join the ranks that torchrun, or any launcher that sets RANK and WORLD_SIZE, has started."""
    if not ranks.joined():
        yield
        return
    with naming_lost_ranks(f"rank {os.environ['RANK']}"):
        ranks.initialise("gloo", TIMEOUT, JOIN)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Team:
    """Ranks that compute the same functions of a batch; a process alone is a team too."""

    def __init__(
        self,
        works: Mapping[str, Callable[[Any], Any]],
        group: dist.ProcessGroup | None = None,
        *,
        workers: int | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """The first `workers` ranks compute, by default all; the others wait with them. `beat` is
        called when a batch or an exchange is done."""
        alone = not dist.is_initialized()
        self.works = works
        self.group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        self.workers = min(self.size, workers or self.size)
        self.beat = beat

    def lead(self, act: Callable[[], T]) -> T | None:
        """Return what `act` returns on rank 0, which may ask the team meanwhile; None on the other
        ranks. Collective."""
        if self.rank:
            while (task := self._told(None)) is not None:
                self._compute(*task)
            return None
        try:
            return act()
        finally:
            self._told(None)

    def ask(self, work: str, batches: Sequence[Sequence[Any]], what: str, unit: str) -> list[Any]:
        """Return the result of each batch, on rank 0. `what` and `unit` name the progress."""
        results: list[Any] = []
        with Progress(what, total=sum(map(len, batches)), unit=unit) as progress:
            step = self.workers * ROUND if self.size > 1 else 1
            for first in range(0, len(batches), step):
                part = batches[first : first + step]
                self._told((work, part))
                results += self._compute(work, part)
                progress.advance(sum(map(len, part)))
        return results

    def _told(self, task: Any) -> Any:
        """Return rank 0's task on all ranks."""
        self.beat()
        if self.size == 1:
            return task
        tasks = [task]
        with naming_lost_ranks(f"rank {self.rank}"):
            dist.broadcast_object_list(tasks, group=self.group, group_src=0)
        return tasks[0]

    def _compute(self, work: str, batches: Sequence[Any]) -> list[Any]:
        """Compute this rank's batches; return the results of all, in order, on rank 0."""
        mine: list[Any] | UserError = []
        try:
            mine = [self._one(work, batch) for batch in self._share(batches)]
        except Exception as error:  # rank 0 raises it, or the others would wait
            mine = error if isinstance(error, UserError) else self._unknown(error)
        found: list[Any] = [mine]
        if self.size > 1:
            found = [None] * self.size
            with naming_lost_ranks(f"rank {self.rank}"):
                dist.gather_object(
                    mine, None if self.rank else found, group=self.group, group_dst=0
                )
        if self.rank:
            return []
        for results in found:
            if isinstance(results, UserError):
                raise results
        return [
            found[number % self.workers][number // self.workers] for number in range(len(batches))
        ]

    def _share(self, batches: Sequence[Any]) -> Sequence[Any]:
        return batches[self.rank :: self.workers] if self.rank < self.workers else []

    def _one(self, work: str, batch: Any) -> Any:
        result = self.works[work](batch)
        self.beat()
        return result

    def _unknown(self, error: Exception) -> RunError:
        return RunError(
            f"rank {self.rank} failed: {error!r}", where="\n" + traceback.format_exc().rstrip()
        )
