"""Atomic writes on a local disk.

A file is written next to its target, synced, and renamed over the target. Its temporary name is
fixed, so the next writer reuses what a killed process left; while a living process writes that
file, a unique name is used instead.
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
"""Names of temporary files, whether their writer lives or was killed."""
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
    """Open an empty temporary file that no process writes to; return its path and the file."""
    fixed = target.with_name(f".{target.name}.tmp")
    with contextlib.suppress(OSError):
        file = os.fdopen(os.open(fixed, OPEN_FLAGS, 0o666), "wb")
        if _lock(file, fixed):
            file.truncate(0)
            return fixed, file
        file.close()
    unique = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    return unique, unique.open("xb")


def _lock(file: BinaryIO, path: Path) -> bool:
    """Lock a file; return False if another process holds it or has renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:  # held or gone; or the file system has no locks
        return False
