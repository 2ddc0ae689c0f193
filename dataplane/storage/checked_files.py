"""Files verified since this machine started, known to all its processes.

A verified file stays verified until it changes. Only the kernel sets a file's ctime, so a change by
any program shows, unless it happens within the check's tick of the kernel's clock (4 ms). Disk rot
below a file that nobody writes does not show until the machine restarts: after a power cut a file
may lose data although its times are kept.

A file has a slot of 8 bytes in the table on disk, chosen by hash; files that meet in a slot
overwrite each other, and are verified again.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path

SLOTS = 1 << 18
BOOT = Path("/proc/sys/kernel/random/boot_id")


class CheckedFiles:
    """The table for a folder of files."""

    def __init__(self, table: Path) -> None:
        self.table = table

    def has(self, hash: bytes, status: os.stat_result) -> bool:
        """Return True if a file with this status was verified to have this hash."""
        offset, entry = _entry(hash, status)
        try:
            return os.pread(self._descriptor, len(entry), offset) == entry
        except OSError:
            return False

    def add(self, hash: bytes, status: os.stat_result) -> None:
        offset, entry = _entry(hash, status)
        with suppress(OSError):  # on a full disk: files are verified again
            os.pwrite(self._descriptor, entry, offset)

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self.table, os.O_RDWR | os.O_CREAT, 0o666)


def _entry(hash: bytes, status: os.stat_result) -> tuple[int, bytes]:
    """Return the offset and the content of a file's slot."""
    state = struct.pack("<qqq", status.st_ino, status.st_ctime_ns, status.st_size)
    entry = blake2b(hash + state, digest_size=8, key=_start()).digest()
    return int.from_bytes(entry, "little") % SLOTS * len(entry), entry


@cache
def _start() -> bytes:
    """Return an identifier for the machine's last start, or else for this process."""
    try:
        return BOOT.read_bytes().strip()
    except OSError:
        return os.urandom(16)
