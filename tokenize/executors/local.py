"""Run tasks in this process, or in worker processes on this machine."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...console.errors import RunError, UserError
from ...console.signals import sigint_blocked

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
E = TypeVar("E")


def run_local(
    function: Callable[[T], Iterator[E]], tasks: Sequence[T], workers: int
) -> Iterator[E]:
    """Run `function` on all tasks in `workers` processes (1: in this process)."""
    if workers == 1 or len(tasks) == 1:
        for task in tasks:
            yield from function(task)
        return
    import multiprocessing
    from multiprocessing import resource_tracker
    from multiprocessing.connection import Connection, wait

    context = multiprocessing.get_context("spawn")
    waiting = deque(tasks)
    running: dict[Connection, Any] = {}
    resource_tracker.ensure_running()  # starting it while SIGINT is blocked would unblock it
    try:
        for _ in range(min(workers, len(tasks))):
            parent_end, worker_end = context.Pipe()
            process = context.Process(target=_work, args=(worker_end, function), daemon=True)
            with sigint_blocked():
                process.start()
            worker_end.close()
            running[parent_end] = process
            parent_end.send(waiting.popleft())
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    process = running.pop(pipe)
                    process.join()
                    raise _worker_died(process.exitcode) from None
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


def _work(pipe: Connection, function: Callable[[Any], Iterator[Any]]) -> None:
    """A worker process's main loop: receive a task, send its events, then `done` or an error."""
    try:
        while (task := pipe.recv()) is not None:
            for event in function(task):
                pipe.send(("event", event))
            pipe.send(("done", None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent process is gone
    except UserError as error:
        pipe.send(("error", error))
    except Exception:  # a bug: the parent shows the worker's traceback
        pipe.send(("error", RuntimeError(f"a worker failed:\n{traceback.format_exc()}")))


def _worker_died(code: int | None) -> RunError:
    reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return RunError(
        f"a worker process died ({reason})",
        hint="it may have run out of memory: run the same command again with fewer --workers; "
        "finished shards are kept",
    )
