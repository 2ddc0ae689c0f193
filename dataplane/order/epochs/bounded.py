"""A cache with a byte budget over all sources.

With thousands of sources, a limit per source would be no limit. Eviction is random: rows draw from
the sources in turns, so if the values do not fit, the least recently used one is the next to be
used, and LRU eviction would never hit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

ENTRY_BYTES = 512
"""Bytes per entry beside the value: the key, and Python's objects."""


class BoundedCache(Generic[Key, Value]):
    """Values by key. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.budget = max_bytes
        """Remaining bytes."""
        self._entries: dict[Key, tuple[Value, int]] = {}
        self._keys: list[Key] = []
        self._lock = threading.Lock()
        self._random = random.Random(0)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(key)
        return entry and entry[0]

    def put(self, key: Key, value: Value, size: int) -> None:
        """Add a value with `size` bytes; evicts entries, perhaps this one, to fit the budget."""
        with self._lock:
            if key in self._entries:
                return  # another thread was faster
            self._entries[key] = value, size + ENTRY_BYTES
            self._keys.append(key)
            self.budget -= size + ENTRY_BYTES
            while self.budget < 0:
                index = self._random.randrange(len(self._keys))
                self._keys[index], self._keys[-1] = self._keys[-1], self._keys[index]
                _, freed_bytes = self._entries.pop(self._keys.pop())
                self.budget += freed_bytes
