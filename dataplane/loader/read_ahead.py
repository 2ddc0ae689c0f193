"""Compute results ahead of a consumer, in a thread that works while the consumer is away.

The consumer is away once it has not asked for a result for MIN_PAUSE seconds. A training loop is
away during its step, and then finds results ready. A loop that only reads is never away, and
computes each result itself: two threads that need Python's lock are slower than one, because every
hand-over empties a core's caches. The thread's checks take this lock too, so they become rarer
while the consumer stays.

The thread is a daemon, because Python waits at exit for threads that are not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

MIN_PAUSE, MAX_PAUSE = 0.005, 0.08
"""Seconds between the thread's checks: at first (Python's switch interval), and at most, after many
checks that found the consumer present."""


@dataclass(frozen=True)
class _EndOfResults:
    """Stands after the last result."""

    error: BaseException | None = None
    """What the iterator raised; None if it was exhausted."""


def read_ahead(results: Iterator[T], max_ahead: int, pause: float = MIN_PAUSE) -> Iterator[T]:
    """Yield results in order. A thread computes up to `max_ahead` of them ahead (0: no thread) once
    the consumer has not asked for `pause` seconds. Only one of the two advances the iterator at a
    time. Its error is raised after the results before it."""
    if not max_ahead:
        yield from results
        return
    queue = _ResultQueue(results, max_ahead, pause)
    try:
        while not isinstance(result := queue.take(), _EndOfResults):
            yield result
        if result.error:
            raise result.error
    finally:
        queue.stop()


class _ResultQueue(Generic[T]):
    """Results between the consumer, which calls `take`, and the thread, which runs `_work`."""

    def __init__(self, results: Iterator[T], max_ahead: int, pause: float) -> None:
        self.results, self.max_ahead, self.pause = results, max_ahead, pause
        self.ready: deque[T | _EndOfResults] = deque()
        self.computing = threading.Lock()
        """Held by whoever advances the iterator."""
        self.asking = False
        """True while the consumer waits in `take`."""
        self.full = False
        """True while the thread sleeps because `max_ahead` results are ready."""
        self.last_taken = time.monotonic()
        """When the consumer last received a result."""
        self.signals: SimpleQueue[bool] = SimpleQueue()
        """Wake the thread: True from `take`, because there is room again; False ends it."""
        threading.Thread(target=self._work, name="headrace-read", daemon=True).start()

    def take(self) -> T | _EndOfResults:
        """Return the next result: one that is ready, or else compute it."""
        self.asking = True
        if self.full:
            self.full = False
            self.signals.put(True)
        if not self.ready:
            with self.computing:  # the thread may be computing it: then it is ready now
                if not self.ready:
                    self._compute()
        result = self.ready.popleft()
        self.last_taken, self.asking = time.monotonic(), False
        return result

    def stop(self) -> None:
        """End the thread, after the result that it is computing."""
        self.signals.put(False)

    def _compute(self) -> None:
        try:
            self.ready.append(next(self.results, _EndOfResults()))
        except BaseException as error:  # the consumer raises it
            self.ready.append(_EndOfResults(error))

    def _work(self) -> None:
        pause = self.pause
        while self._wait(pause):
            pause = self.pause if self._is_away() else min(2 * pause, MAX_PAUSE)
            while len(self.ready) < self.max_ahead and self._is_away():
                with self.computing:
                    self._compute()
            self.full = len(self.ready) >= self.max_ahead

    def _wait(self, pause: float) -> bool:
        """Wait until there is room, then `pause` seconds more; return False if stopped."""
        if self.full and not self.signals.get():
            return False
        with suppress(Empty):
            return self.signals.get(timeout=pause)
        return True

    def _is_away(self) -> bool:
        return not self.asking and time.monotonic() - self.last_taken >= self.pause
