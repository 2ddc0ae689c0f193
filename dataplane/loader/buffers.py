"""Memory that is used again once its last view is gone.

Fresh pages cost the kernel about as much time as widening the ids that fill them.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from ..arrays import Bytes

KEPT = 8
"""Most buffers that are kept without a view."""


class Buffers:
    """Buffers of a reader; threads may share them."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque(maxlen=KEPT)
        """Finalizers append to it, in any thread."""

    def take(self, size: int) -> Bytes:
        """Return memory of `size` bytes, which is taken back when no view of it is left."""
        try:
            memory = self._free.pop()  # the last one used is still in the processor's cache
        except IndexError:
            memory = memoryview(bytearray())
        if len(memory) < size:
            memory = np.empty(size, np.uint8).data
        # Every view, and every tensor over a view, references this array, whose own base is None.
        lent = np.frombuffer(memory, np.uint8)
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent[:size]
