"""Results computed ahead of a consumer, by a thread that works while the consumer is away.

A consumer that asks for more computes the next result itself: two threads that need Python's lock
are slower than one, because every hand-over empties a core's caches. So the thread begins when the
consumer has not asked for MIN_PAUSE seconds, and stops when it asks again. A training loop finds
results ready. A loop that only reads is as quick as without the thread, which checks ever more
rarely whether the consumer is away, because a check takes Python's lock.

The thread is a daemon: at exit, Python waits for other threads.
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
"""Seconds between the thread's checks: at first (Python's switch interval), and after many checks
that found the consumer present."""


@dataclass(frozen=True)
class _EndOfResults:
    """The end, or the error that ended the results."""

    error: BaseException | None = None


def read_ahead(results: Iterator[T], max_ahead: int, pause: float = MIN_PAUSE) -> Iterator[T]:
    """Yield results in order, at most `max_ahead` computed ahead, while the consumer has been away
    for `pause` seconds. Only one thread at a time advances the iterator."""
    if not max_ahead:
        yield from results
        return
    ahead = _ResultQueue(results, max_ahead, pause)
    try:
        while not isinstance(result := ahead.take(), _EndOfResults):
            yield result
        if result.error:
            raise result.error
    finally:
        ahead.signals.put(False)


class _ResultQueue(Generic[T]):
    """The results between the consumer and the thread."""

    def __init__(self, results: Iterator[T], max_ahead: int, pause: float) -> None:
        self.results, self.max_ahead, self.pause = results, max_ahead, pause
        self.ready: deque[T | _EndOfResults] = deque()
        self.computing = threading.Lock()
        self.asking = self.full = False
        self.asked = time.monotonic()
        """When the consumer last received a result."""
        self.signals: SimpleQueue[bool] = SimpleQueue()
        """True says that the consumer asks again; False ends the thread."""
        threading.Thread(target=self._work, name="headrace-read", daemon=True).start()

    def take(self) -> T | _EndOfResults:
        """Return the next result, computed ahead or now."""
        self.asking = True
        if self.full:
            self.full = False
            self.signals.put(True)
        if not self.ready:
            with self.computing:  # the thread may have begun to compute it
                if not self.ready:
                    self._compute()
        result = self.ready.popleft()
        self.asked, self.asking = time.monotonic(), False
        return result

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
        """Wait for room, and then `pause` seconds; False at the end."""
        if self.full and not self.signals.get():
            return False
        with suppress(Empty):
            return self.signals.get(timeout=pause)
        return True

    def _is_away(self) -> bool:
        return not self.asking and time.monotonic() - self.asked >= self.pause
