"""Run tasks on a Ray cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ...console.errors import MissingError, RunError, UserError

T = TypeVar("T")
E = TypeVar("E")


def run_on_ray(
    function: Callable[[T], Iterator[E]], tasks: Sequence[T], address: str | None
) -> Iterator[E]:
    """Run `function` on all tasks on the Ray cluster at `address`, or on one that Ray starts here.

    Every node needs headrace, and must see the corpus and the dataset under the same URLs. If a
    node is lost, its tasks are run again.
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
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            raise RunError(
                f"there is no Ray cluster at {address}: {error}",
                hint="check --address. A cluster that asks for a token needs RAY_AUTH_MODE=token "
                "and RAY_AUTH_TOKEN here too",
            ) from None
    slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
    remote = ray.remote(num_cpus=1, max_retries=3)(_run_task)
    shared = ray.put(function)
    waiting = deque(tasks)
    running: list[Any] = []
    try:
        while waiting or running:
            while waiting and len(running) < slots:
                task = waiting.popleft()
                running.append(remote.options(num_returns="streaming").remote(shared, task))
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


def _run_task(function: Callable[[T], Iterator[E]], task: T) -> Iterator[E]:
    yield from function(task)
