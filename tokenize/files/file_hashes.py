"""Fingerprints of input files: two files have the same fingerprint if their content is equal.

Local files are hashed in full. Hashing a terabyte is slow, and adding one file to it must not be,
so hashes are cached, keyed by the fields that the file system changes on every write: inode, size,
and the times of the last change in nanoseconds (mtime, and ctime, which no user can set). The hash
of a file that changed a moment ago is not cached: a second change within the same clock tick would
go unnoticed.

For objects in a store, the fingerprint is derived from the store's tag or version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...console.errors import InputError
from ...console.log import get_logger
from ...console.progress import Progress
from ...dataplane.storage import hub, remote, storage
from . import web
from .input_file import BLOCK_BYTES, File
from .open_file import open_file

log = get_logger(__name__)

READERS = 8
"""Files hashed at the same time."""
MIN_CACHED_BYTES = 1 << 20
"""Smallest file whose hash is cached: hashing a smaller one is as fast as a lookup."""
CLOCK_RESOLUTION = 2.0
"""Seconds within which two changes may get the same time, on the coarsest file systems."""

CONTENT_KEYS = ("md5Hash", "Content-MD5")
"""Attributes of an object that are a hash of its content alone."""
VERSION_KEYS = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified")
"""Attributes that change with the object. Objects of different names may share a value."""

FileState = tuple[int, int, int, int, int]
"""State of a local file: device, inode, size, mtime and ctime in nanoseconds."""


def with_fingerprints(files: Sequence[File], *, rehash: bool = False) -> list[File]:
    """Return the files with their fingerprints; `rehash` ignores cached hashes."""
    with _open_cache() as cache:
        known: dict[str, str] = {}
        for file in [] if rehash else files:
            if fingerprint := cache.get(_state(file.name)):
                known[file.name] = fingerprint
        todo = [file for file in files if file.name not in known]
        if todo:
            _hash(todo, known, cache)
    return [replace(file, fingerprint=known[file.name]) for file in files]


def _hash(files: Sequence[File], known: dict[str, str], cache: HashCache) -> None:
    """Read the files, and add their fingerprints to the known and the cached ones."""
    size = sum(file.size for file in files)
    with (
        Progress("hashing the inputs", total=size, unit="B") as progress,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for file, (fingerprint, state) in zip(files, pool.map(_fingerprint, files), strict=True):
            known[file.name] = fingerprint
            cache.put(state, fingerprint)
            progress.advance(file.size, files=1)


def check_unchanged(files: Sequence[File], since: float) -> None:
    """Raise an error if a file was written since this time, when reading began."""
    with ThreadPoolExecutor(READERS) as pool:
        flags = pool.map(lambda file: _has_changed(file, since), files)
        changed = [file.name for file, flag in zip(files, flags, strict=True) if flag]
    if changed:
        raise InputError(
            f"{len(changed)} inputs changed while they were read: {', '.join(changed[:10])}",
            hint="build from files that no program is writing",
        )


def _has_changed(file: File, since: float) -> bool:
    state = _state(file.name)
    if state is not None:
        return state[4] / 1e9 > since
    version = _version(file)
    return version is not None and _name_of([version.encode()]) != file.fingerprint


def information(name: str) -> dict[str, Any]:
    """Return the attributes of an object or a web file."""
    if web.is_web(name):
        return web.information(name)
    return remote.request("read", name, lambda fs, path: dict(fs.info(path)))


class HashCache:
    """Hashes of files by their states, in an SQLite database in the user's cache folder."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.database = sqlite3.connect(path, timeout=30)
        self.database.execute(
            "create table if not exists files (file text primary key, state text, hash text)"
        )

    def get(self, state: FileState | None) -> str | None:
        """Return the cached hash of a file in this state."""
        if state is None:
            return None
        row = self.database.execute(
            "select hash from files where file = ? and state = ?", _columns(state)
        ).fetchone()
        return None if row is None else str(row[0])

    def put(self, state: FileState | None, fingerprint: str) -> None:
        if (
            state is None
            or state[2] < MIN_CACHED_BYTES
            or time.time() - state[4] / 1e9 < CLOCK_RESOLUTION
        ):
            return
        with self.database:
            self.database.execute(
                "insert or replace into files values (?, ?, ?)", (*_columns(state), fingerprint)
            )


def _columns(state: FileState) -> tuple[str, str]:
    return ":".join(map(str, state[:2])), ":".join(map(str, state[2:]))


class NoHashCache(HashCache):
    """No cache: used if the database cannot be opened."""

    def __init__(self) -> None:
        pass

    def get(self, state: FileState | None) -> str | None:
        return None

    def put(self, state: FileState | None, fingerprint: str) -> None:
        pass


def cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "headrace-tokenize" / "fingerprints.sqlite"


@contextlib.contextmanager
def _open_cache() -> Iterator[HashCache]:
    try:
        cache = HashCache(cache_file())
    except (OSError, sqlite3.Error) as error:
        log.info("hashes of inputs are not cached: %s", error)
        yield NoHashCache()
        return
    with contextlib.closing(cache.database):
        yield cache


def _state(name: str) -> FileState | None:
    if not storage.is_local(name):
        return None
    try:
        stat = storage.local_path(name).stat()
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _fingerprint(file: File) -> tuple[str, FileState | None]:
    """Return the fingerprint of a file, and the file's state before it was read."""
    state = _state(file.name)
    version = None if state is not None else _version(file)
    if version is not None:
        return _name_of([version.encode()]), state
    with open_file(file.name) as stream:
        return _name_of(iter(partial(stream.read, BLOCK_BYTES), b"")), state


def _name_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


def _version(file: File) -> str | None:
    """Return attributes of an object that identify its content, if the store has any."""
    info = information(file.name)
    if hub.is_hub(file.name) and (content := hub.content_hash(info)) is not None:
        return f"{file.size} {content}"
    for key in CONTENT_KEYS:
        if info.get(key):
            return f"{file.size} {info[key]}"
    for key in VERSION_KEYS:
        if info.get(key):
            # An S3 tag is derived from the content; other tags are unique within one name only.
            same_anywhere = key == "ETag" and file.name.startswith(("s3://", "s3a://"))
            return f"{'' if same_anywhere else file.name} {file.size} {info[key]}"
    return None
