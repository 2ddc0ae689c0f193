"""Calls in parallel threads, for calls that wait for a store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")

MAX_THREADS = 16


def run_parallel(act: Callable[[T], object], items: Collection[T]) -> None:
    """Run `act` on all items, THREADS of them at a time; raise the first error."""
    waiting, errors = deque(items), deque[BaseException]()

    def work() -> None:
        while True:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                act(item)
            except BaseException as error:  # the caller raises it
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="headrace-open", daemon=True)
        for _ in range(min(MAX_THREADS, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
