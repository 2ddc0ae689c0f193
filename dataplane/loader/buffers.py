"""Memory reused once the last view is gone.

The kernel needs about as long for fresh pages as widening the ids that fill them takes.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from ..arrays import Bytes

MAX_FREE = 8
"""Free buffers kept."""


class BufferPool:
    """A reader's buffers. Thread-safe."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque(maxlen=MAX_FREE)
        """Finalizers append to it, in any thread."""

    def take(self, size: int) -> Bytes:
        """Return `size` bytes of memory, which returns to the pool with the last view."""
        try:
            memory = self._free.pop()  # the latest is still in the processor's cache
        except IndexError:
            memory = memoryview(bytearray())
        if len(memory) < size:
            memory = np.empty(size, np.uint8).data
        # Every view, and every tensor over a view, references this array, whose own base is None.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array[:size]
