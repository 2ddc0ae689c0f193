"""Atomic writes on a local disk.

A file is written beside its target, synced, and renamed over the target. The temporary name is
fixed, so that the next writer reuses a file that a killed process has left; if a living process is
writing that file, a unique name is used instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

HALF_WRITTEN = re.compile(r"\..+\.tmp")
"""Names of temporary files, of living and of killed writers."""
OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `target` when the block ends without an error."""
    temporary, file = _open_temporary(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)
        sync(target.parent)
    except OSError:
        with contextlib.suppress(OSError):  # it may have been renamed already
            temporary.unlink()
        raise


def sync(path: Path) -> None:
    """fsync a file or a folder, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """Open an empty temporary file that no other process writes to; return it with its path."""
    usual = target.with_name(f".{target.name}.tmp")
    with contextlib.suppress(OSError):
        file = os.fdopen(os.open(usual, OPEN_FLAGS, 0o666), "wb")
        if _lock(file, usual):
            file.truncate(0)
            return usual, file
        file.close()
    other = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    return other, other.open("xb")


def _lock(file: BinaryIO, path: Path) -> bool:
    """Lock a file. False if another process holds it or has renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:  # held or gone; or the file system has no locks
        return False
