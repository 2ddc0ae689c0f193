"""Where tasks run: in this process, in processes of this machine, or on a Ray cluster.

A task is a generator: what it yields is told to the caller while it runs. An engine promises
nothing about order; tasks are written so that none is needed.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ..console.errors import RunError, UserError

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


def default_workers() -> int:
    return len(os.sched_getaffinity(0))


def _work(pipe: Connection, function: Function[Any, Any]) -> None:
    """A worker's life: take an item, tell what happens, say when it is done."""
    try:
        while (item := pipe.recv()) is not None:
            for event in function(item):
                pipe.send(("event", event))
            pipe.send(("done", None))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return  # the build that we work for is gone
    except UserError as error:
        pipe.send(("error", error))
    except Exception:  # a fault of ours: the parent shows where in the worker it was
        pipe.send(("error", RuntimeError(f"a worker failed:\n{traceback.format_exc()}")))


def _lost(code: int | None) -> RunError:
    reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return RunError(
        f"a worker died ({reason})",
        mend="was it out of memory? Run the same command again, with fewer --workers: "
        "finished shards are kept",
    )
