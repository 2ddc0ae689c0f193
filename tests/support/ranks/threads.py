"""Ranks as threads of one process, whose collectives hand tensors over in memory.

They cost a few context switches where processes wait for each other: hundreds of layouts take a
minute. What names process groups inside of custom ops (fused kernels, FP8) needs real ranks.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from headrace.models.parallel import collectives, experts
from headrace.models.parallel.axes import ALONE, Axes, Axis
from headrace.trainer.layout.config import LayoutConfig

T = TypeVar("T")
PATIENCE = 120.0


class ThreadGroup:
    """A process group of threads."""

    def __init__(self, name: str, ranks: Sequence[int], local: threading.local) -> None:
        self.group_name = name
        self.ranks = list(ranks)
        self.local = local
        self.barrier = threading.Barrier(len(ranks))
        self.items: list[Any] = [None] * len(ranks)

    def swap(self, item: T) -> tuple[int, list[T]]:
        """Return this thread's position, and the items of all threads."""
        position = self.ranks.index(self.local.rank)
        self.items[position] = item
        self.barrier.wait(PATIENCE)
        items = list(self.items)
        self.barrier.wait(PATIENCE)
        return position, items


class ThreadRanks:
    """`run(task)` calls `task(rank)` in a thread for each rank, and returns the results."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.local = threading.local()
        self.groups: dict[str, ThreadGroup] = {}
        self.lock = threading.Lock()

    def run(self, task: Callable[[int], T]) -> list[T]:
        results: dict[int, T] = {}
        failures: list[str] = []
        self.groups.clear()

        def work(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = task(rank)
            except Exception:
                failures.append(f"rank {rank}: {traceback.format_exc()}")
                for group in list(self.groups.values()):
                    group.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        exchange = mock.patch.object(experts.dist, "all_to_all_single", exchange_counts)
        with mock.patch.object(collectives, "_ops", Operations(self.groups)), exchange:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures, "\n".join(failures)
        return [results[rank] for rank in range(self.size)]

    def axes(self, layout: LayoutConfig, rank: int) -> tuple[Axis, Axes]:
        """Return the axis of the ranks that share a batch's rows, and those that shard a model."""
        grid = torch.arange(self.size).view(-1, layout.cp, layout.tp)
        by_experts = grid.reshape(-1, layout.ep)
        axes = Axes(
            tensor=self.axis("tensor", grid, [2], rank),
            context=self.axis("context", grid, [1], rank),
            experts=self.axis("experts", by_experts, [1], rank),
            row_parts=self.axis("rows", grid, [1, 2], rank) if layout.ep > 1 else ALONE,
            **layout.row_forms,
        )
        return self.axis("data", grid, [0], rank), axes

    def axis(self, kind: str, grid: Tensor, dims: list[int], rank: int) -> Axis:
        """Return the axis of ranks that differ from this rank along `dims` alone."""
        lines = grid.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)).flatten(0, -2)
        [line] = [line for line in lines.tolist() if rank in line]
        if len(line) == 1:
            return ALONE
        name = f"{kind} {line}"
        with self.lock:
            group: Any = self.groups.setdefault(name, ThreadGroup(name, line, self.local))
        return Axis(group, line.index(rank), len(line))


class Operations:
    """Those of torch that models/parallel/collectives.py calls, by the names of groups."""

    def __init__(self, groups: dict[str, ThreadGroup]) -> None:
        self.groups = groups

    def all_gather_into_tensor(self, x: Tensor, size: int, name: str) -> Tensor:
        return torch.cat(self.groups[name].swap(x)[1])

    def reduce_scatter_tensor(self, x: Tensor, operation: str, size: int, name: str) -> Tensor:
        position, items = self.groups[name].swap(x)
        return torch.stack([item.chunk(size)[position] for item in items]).sum(0)

    def all_reduce(self, x: Tensor, operation: str, name: str) -> Tensor:
        items = torch.stack(self.groups[name].swap(x)[1])
        return items.sum(0) if operation == "sum" else items.amax(0)

    def all_to_all_single(
        self, flat: Tensor, recv_counts: list[int], send_counts: list[int], name: str
    ) -> Tensor:
        position, items = self.groups[name].swap((flat, send_counts))
        assert [counts[position] for _, counts in items] == recv_counts
        return torch.cat([sent.split(counts)[position] for sent, counts in items])

    def wait_tensor(self, x: Tensor) -> Tensor:
        return x


def exchange_counts(received: Tensor, sent: Tensor, group: Any) -> None:
    position, items = group.swap(sent)
    received.copy_(torch.cat([item.chunk(len(items))[position] for item in items]))
