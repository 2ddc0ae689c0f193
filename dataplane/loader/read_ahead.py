"""Results made ahead of their consumer, by a thread that works while the consumer is away.

A consumer that asks for more makes the next result itself: two threads that need Python's lock at a
time take longer than one, because each hand-over empties the caches of a core. So the thread begins
when the consumer has not asked for PAUSE seconds, and stops when it asks again. A loop that trains
finds its results ready. A loop that does nothing else is as quick as without the thread, which
looks more and more rarely whether the consumer is away, because each look takes Python's lock.

The thread is a daemon: at exit, Python waits for all others.
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

PAUSE, LONGEST = 0.005, 0.08
"""Seconds until the thread looks again: at first, which is when Python takes its lock from a thread
that others wait for, and after many looks at a consumer that is not away."""


@dataclass(frozen=True)
class _End:
    """The end of the results, or the error that ended them."""

    error: BaseException | None = None


def read_ahead(results: Iterator[T], most: int, pause: float = PAUSE) -> Iterator[T]:
    """Yield the results in order, of which at most `most` are made ahead. The iterator is advanced
    by one thread at a time, while the consumer has been away for `pause` seconds."""
    if not most:
        yield from results
        return
    ahead = _Ahead(results, most, pause)
    try:
        while not isinstance(result := ahead.take(), _End):
            yield result
        if result.error:
            raise result.error
    finally:
        ahead.signals.put(False)


class _Ahead(Generic[T]):
    """The results between the consumer and the thread."""

    def __init__(self, results: Iterator[T], most: int, pause: float) -> None:
        self.results, self.most, self.pause = results, most, pause
        self.ready: deque[T | _End] = deque()
        self.making = threading.Lock()
        self.asking = self.full = False
        self.asked = time.monotonic()
        """When the consumer was last given a result."""
        self.signals: SimpleQueue[bool] = SimpleQueue()
        """True says that the consumer asks again; False ends the thread."""
        threading.Thread(target=self._work, name="headrace-read", daemon=True).start()

    def take(self) -> T | _End:
        """Return the next result, made ahead or now."""
        self.asking = True
        if self.full:
            self.full = False
            self.signals.put(True)
        if not self.ready:
            with self.making:  # the thread may have begun to make it
                if not self.ready:
                    self._make()
        result = self.ready.popleft()
        self.asked, self.asking = time.monotonic(), False
        return result

    def _make(self) -> None:
        try:
            self.ready.append(next(self.results, _End()))
        except BaseException as error:  # the consumer raises it
            self.ready.append(_End(error))

    def _work(self) -> None:
        pause = self.pause
        while self._waited(pause):
            pause = self.pause if self._is_away() else min(2 * pause, LONGEST)
            while len(self.ready) < self.most and self._is_away():
                with self.making:
                    self._make()
            self.full = len(self.ready) >= self.most

    def _waited(self, pause: float) -> bool:
        """Wait until there is room, and then for `pause` seconds; False at the end."""
        if self.full and not self.signals.get():
            return False
        with suppress(Empty):
            return self.signals.get(timeout=pause)
        return True

    def _is_away(self) -> bool:
        return not self.asking and time.monotonic() - self.asked >= self.pause
