"""Files on a local disk that appear whole or not at all.

What is written lies beside its place until it is on the disk, and is then moved there, by one
rename. Its name is always the same, so that whoever writes there next takes up what a killed
process has left; only what a living process is writing has a name of its own beside that.
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
"""The name of a file that is being written, or was when its process was killed."""
EMPTIED_LATER = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def becoming(target: Path) -> Iterator[BinaryIO]:
    """A file to write into, that then takes the place of `target`."""
    temporary, file = _beside(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)
        sync(target.parent)
    except OSError:
        with contextlib.suppress(OSError):  # it may be `target` by now
            temporary.unlink()
        raise


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(target: Path) -> tuple[Path, BinaryIO]:
    """An empty file that nobody else writes to, and its path."""
    usual = target.with_name(f".{target.name}.tmp")
    with contextlib.suppress(OSError):
        file = os.fdopen(os.open(usual, EMPTIED_LATER, 0o666), "wb")
        if _is_ours(file, usual):
            file.truncate(0)
            return usual, file
        file.close()
    other = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    return other, other.open("xb")


def _is_ours(file: BinaryIO, path: Path) -> bool:
    """Whether we alone write to a file, and nobody has moved it into its place meanwhile."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:  # it is held, or gone; or there are no locks on this disk
        return False
