"""Values that a process keeps, within a number of bytes over all sources.

With thousands of sources, a limit for each source would be no limit. A value that must make room is
drawn at random: rows draw from the sources in turns, and if not all values fit, the one that was
used longest ago is the next to be used. Dropping that one would leave no hit at all.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

ENTRY = 512
"""Bytes of an entry beside those of its value: the key, and Python's objects."""


class Bounded(Generic[Key, Value]):
    """Values by key. Thread-safe."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of all entries."""
        self.room = most
        """Bytes that are left."""
        self._entries: dict[Key, tuple[Value, int]] = {}
        self._keys: list[Key] = []
        self._lock = threading.Lock()
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(key)
        return entry and entry[0]

    def keep(self, key: Key, value: Value, size: int) -> None:
        """Keep a value of `size` bytes, and drop others, or this one, until all are within the
        limit."""
        with self._lock:
            if key in self._entries:
                return  # another thread has made it
            self._entries[key] = value, size + ENTRY
            self._keys.append(key)
            self.room -= size + ENTRY
            while self.room < 0:
                place = self._random.randrange(len(self._keys))
                self._keys[place], self._keys[-1] = self._keys[-1], self._keys[place]
                _, freed = self._entries.pop(self._keys.pop())
                self.room += freed
