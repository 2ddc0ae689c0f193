"""What a terminal says to all processes at once, and who listens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deaf() -> Iterator[None]:
    """Processes that are started in here never hear Ctrl-C, not even before their first line: it
    is meant for the one that has started them, and ends them."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start would open the ears again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
