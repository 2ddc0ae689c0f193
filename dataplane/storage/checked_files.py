"""Which files were verified since this machine started: known to all of its processes.

A verified file stays verified until it changes. Only the kernel sets a file's ctime, so a change by
any program shows (but for one within the same tick of the kernel's clock, 4 ms, as the check). What
does not show is rot of the disk below a file that nobody writes, until the machine restarts: after
a power cut the data of a file may be lost although its times are kept.

The table on the disk has a slot of 8 bytes for each file, chosen by hash; files that meet in a slot
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
    """The table of a folder of files."""

    def __init__(self, table: Path) -> None:
        self.table = table

    def has(self, hash: bytes, status: os.stat_result) -> bool:
        """True if a file of this status was found to have this hash."""
        place, entry = _entry(hash, status)
        try:
            return os.pread(self._descriptor, len(entry), place) == entry
        except OSError:
            return False

    def add(self, hash: bytes, status: os.stat_result) -> None:
        place, entry = _entry(hash, status)
        with suppress(OSError):  # on a full disk: files are verified again
            os.pwrite(self._descriptor, entry, place)

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self.table, os.O_RDWR | os.O_CREAT, 0o666)


def _entry(hash: bytes, status: os.stat_result) -> tuple[int, bytes]:
    """Return the place and the content of the slot of a file."""
    state = struct.pack("<qqq", status.st_ino, status.st_ctime_ns, status.st_size)
    entry = blake2b(hash + state, digest_size=8, key=_start()).digest()
    return int.from_bytes(entry, "little") % SLOTS * len(entry), entry


@cache
def _start() -> bytes:
    """Return an identifier of the machine's last start; of this process if it is not known."""
    try:
        return BOOT.read_bytes().strip()
    except OSError:
        return os.urandom(16)
