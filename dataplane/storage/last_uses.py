"""When the files of a folder were last used: a table shared by the processes of a machine.

The times of a file itself do not serve: setting one also sets its ctime, by which `CheckedFiles`
sees that a file has changed. Files that meet in a slot share the later time.
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
"""Since 1970, of a clock that may be wrong: they only decide which files are evicted first."""


class LastUses:
    """The table of a folder of files."""

    def __init__(self, table: Path) -> None:
        self.table = table

    def mark(self, number: int) -> None:
        """Record that the file of this number is used now."""
        with suppress(OSError, struct.error):  # on a full disk; a time before 1970
            os.pwrite(self._descriptor, SECONDS.pack(int(clock())), _place(number))

    def of(self, number: int) -> int:
        """Return the second in which a file was last used; 0 if that is not known."""
        with suppress(OSError, struct.error):
            found: int = SECONDS.unpack(os.pread(self._descriptor, 4, _place(number)))[0]
            return found
        return 0

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self.table, os.O_RDWR | os.O_CREAT, 0o666)


def _place(number: int) -> int:
    return number % SLOTS * SECONDS.size
