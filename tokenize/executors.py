"""Where tasks run: in this process, in processes of this machine, or on a Ray cluster.

A task is a generator: what it yields is told to the caller while it runs. An engine promises
nothing about order; tasks are written so that none is needed.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

from ..console.errors import MissingError, RunError, UserError
from ..console.machine import cores
from ..console.signals import deaf

T = TypeVar("T")
E = TypeVar("E")
Function = Callable[[T], Iterator[E]]


def run_local(function: Function[T, E], items: Sequence[T], workers: int) -> Iterator[E]:
    """Run `function` over items in `workers` processes of this machine (1: in this one)."""
    if workers == 1 or len(items) == 1:
        for item in items:
            yield from function(item)
        return
    context = multiprocessing.get_context("spawn")
    waiting = deque(items)
    running: dict[Connection, Any] = {}
    try:
        for _ in range(min(workers, len(items))):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, function), daemon=True)
            with deaf():
                process.start()
            there.close()
            running[here] = process
            here.send(waiting.popleft())
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    process = running.pop(pipe)
                    process.join()
                    raise _lost(process.exitcode) from None
                if kind == "event":
                    yield value
                elif kind == "error":
                    raise value
                elif waiting:
                    pipe.send(waiting.popleft())
                else:
                    pipe.send(None)
                    running.pop(pipe).join()
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()


def run_on_ray(function: Function[T, E], items: Sequence[T], address: str | None) -> Iterator[E]:
    """Run `function` over items on a Ray cluster: the one at `address`, or one of this machine.

    Every node needs headrace, and must see the corpus and the dataset under the same URLs. A task
    whose node is lost is run again.
    """
    try:
        import ray
    except ImportError:
        raise MissingError(
            "the ray engine needs Ray", hint="pip install 'headrace[ray]', or use --engine local"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise RunError(
                f"there is no Ray cluster at {address}: {error}", hint="check --address"
            ) from None
    slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
    remote = ray.remote(num_cpus=1, max_retries=3)(_generate)
    shared = ray.put(function)
    waiting = deque(items)
    running: list[Any] = []
    try:
        while waiting or running:
            while waiting and len(running) < slots:
                item = waiting.popleft()
                running.append(remote.options(num_returns="streaming").remote(shared, item))
            ready, running = ray.wait(running, num_returns=1)
            for stream in ready:
                try:
                    yield ray.get(next(stream))
                    running.append(stream)
                except StopIteration:
                    continue
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, UserError) else error from None
    finally:
        for stream in running:
            ray.cancel(stream, force=True)


def _generate(function: Function[T, E], item: T) -> Iterator[E]:
    yield from function(item)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    kind: Literal["local", "ray"] = "local"
    """Where tasks run: processes of this machine, or a Ray cluster."""
    workers: int | None = None
    """local: how many processes; None: as many as there are cores."""
    address: str | None = None
    """ray: the cluster; None: one that Ray starts on this machine."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers is {self.workers}; at least one is needed")
        if self.address is not None and self.kind != "ray":
            raise ValueError("address is of a Ray cluster: it needs kind `ray`")
        if self.workers is not None and self.kind == "ray":
            raise ValueError("workers is of the local engine; a Ray cluster has its own")


def run(config: EngineConfig, function: Function[T, E], items: Sequence[T]) -> Iterator[E]:
    """Run `function` over items, and give back what they tell as they tell it."""
    if config.kind == "ray":
        return run_on_ray(function, items, config.address)
    return run_local(function, items, local_workers(config))


def local_workers(config: EngineConfig) -> int:
    """How many processes of this machine work; none, where a cluster does."""
    if config.kind == "ray":
        return 0
    return config.workers or cores()


def _work(pipe: Connection, function: Function[Any, Any]) -> None:
    """A worker's life: take an item, tell what happens, say when it is done."""
    try:
        while (item := pipe.recv()) is not None:
            for event in function(item):
                pipe.send(("event", event))
            pipe.send(("done", None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the build that we work for is gone
    except UserError as error:
        pipe.send(("error", error))
    except Exception:  # a fault of ours: the parent shows where in the worker it was
        pipe.send(("error", RuntimeError(f"a worker failed:\n{traceback.format_exc()}")))


def _lost(code: int | None) -> RunError:
    reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return RunError(
        f"a worker died ({reason})",
        hint="was it out of memory? Run the same command again, with fewer --workers: "
        "finished shards are kept",
    )
