"""Executors: run tasks in this process, in processes on this machine, or on a Ray cluster.

A task function is a generator; the executor passes its events to the caller as they come, in any
order across tasks: tasks must not depend on each other.

This module imports no executor: command-line help lists their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ...console.machine import cores

T = TypeVar("T")
E = TypeVar("E")

ExecutorKind = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    kind: ExecutorKind = "local"
    """Executor of the tasks: processes of this machine, or a Ray cluster."""
    workers: int | None = None
    """local: number of processes; None: one per core."""
    address: str | None = None
    """ray: address of the cluster; None: Ray starts one on this machine."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}; it must be at least 1")
        if self.address is not None and self.kind != "ray":
            raise ValueError("address is the address of a Ray cluster: it needs kind `ray`")
        if self.workers is not None and self.kind == "ray":
            raise ValueError("workers is for the local engine; a Ray cluster has its own workers")


def run(
    config: ExecutorConfig, function: Callable[[T], Iterator[E]], tasks: Sequence[T]
) -> Iterator[E]:
    """Run `function` on all tasks, and yield their events as they come."""
    if config.kind == "ray":
        from .ray_cluster import run_on_ray

        return run_on_ray(function, tasks, config.address)
    from .local import run_local

    return run_local(function, tasks, local_workers(config))


def local_workers(config: ExecutorConfig) -> int:
    """Return the number of worker processes on this machine; 0 if a Ray cluster runs the tasks."""
    if config.kind == "ray":
        return 0
    return config.workers or cores()
