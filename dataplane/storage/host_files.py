"""Files that a host's processes share: computed or fetched once, and mapped by all.

They can be made again at any time. Writing a file deletes those that no process has opened for 30
days.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..arrays import Bytes
from .atomic import replacing
from .mapped import map_file

UNUSED_SECONDS = 30 * 24 * 3600


def folder() -> Path:
    """Return this user's folder; without a home, a path that cannot be written."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:  # a user without an entry in the password file, as in some containers
        home = Path(os.devnull)
    return home / "headrace-plans"


def map_shared(file: Path) -> Bytes:
    """Map a file in the folder for reading, and mark it as used."""
    with suppress(OSError):  # it may belong to another user
        os.utime(file)
    return map_file(file)


def write(file: Path, data: bytes | bytearray) -> None:
    """Write a file atomically, and delete long unused files in its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as out:
        out.write(data)
    oldest = file.stat().st_mtime - UNUSED_SECONDS  # by the file system's clock
    for path in file.parent.iterdir():
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
