"""When a folder's files were last used: a table that a machine's processes share.

A file's own times do not serve: setting them also sets its ctime, by which `CheckedFiles` sees
changes. Files that meet in a slot share the later time.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import time as clock

SLOTS = 1 << 18
SECONDS = struct.Struct("<I")
"""Seconds since 1970, by a clock that may be wrong: they only decide what is evicted first."""


class LastUses:
    """The table for a folder of files."""

    def __init__(self, table: Path) -> None:
        self.table = table

    def mark(self, number: int) -> None:
        """Record that the file with this number is used now."""
        with suppress(OSError, struct.error):  # on a full disk; a time before 1970
            os.pwrite(self._descriptor, SECONDS.pack(int(clock())), _offset(number))

    def last_use(self, number: int) -> int:
        """Return the second in which a file was last used, or 0 if unknown."""
        with suppress(OSError, struct.error):
            second: int = SECONDS.unpack(os.pread(self._descriptor, 4, _offset(number)))[0]
            return second
        return 0

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self.table, os.O_RDWR | os.O_CREAT, 0o666)


def _offset(number: int) -> int:
    return number % SLOTS * SECONDS.size
