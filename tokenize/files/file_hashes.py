"""Fingerprints of input files: two files have the same fingerprint if their content is equal.

Local files are hashed in full. Hashing a terabyte is slow, and adding one file to it must not be,
so hashes are cached, keyed by what the file system changes on every write: inode, size, and the
times of the last change in nanoseconds (mtime, and ctime, which no user can set). The same state is
compared again when a build has read its inputs, and their content while it reads them (see
checksums.py). The machine's clock is asked for nothing: it may be wrong, and the times of a file
may come from a server with another clock.

Two changes within one tick of the file system's clock have the same time. Between a file's state
and the first byte that is read, a tick is therefore waited for: whoever writes the file after that
changes its state. (Stores through a memory map change it when the kernel writes the page back.)

For objects in a store, the fingerprint is derived from the store's tag or version. Their content is
not read, and has no checksums.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from ...console.log import get_logger
from ...console.progress import Progress
from ...dataplane.storage import hub, remote, storage
from . import web
from .checksums import (
    BlockChecksums,
    ContentHash,
    changed_inputs_error,
    choose_block_bytes,
    hash_content,
    name_content,
)
from .input_file import File
from .open_file import open_file

log = get_logger(__name__)

READERS = 8
"""Files hashed at the same time."""
MIN_CACHED_BYTES = 1 << 20
"""Smallest file whose hash is cached: hashing a smaller one is as fast as a lookup."""
TICK = 0.02
"""Seconds within which two changes may get the same time."""
COARSE_TICK = 2.0
"""The same, for file systems with times in whole seconds."""

CONTENT_KEYS = ("md5Hash", "Content-MD5")
"""Attributes of an object that are a hash of its content alone."""
VERSION_KEYS = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified")
"""Attributes that change with the object. Objects of different names may share a value."""


@dataclass(frozen=True)
class FileState:
    """What changes with a file."""

    size: int
    stat: tuple[int, int, int, int] | None = None
    """Of a local file: device, inode, mtime and ctime in nanoseconds."""
    version: str | None = None
    """Of an object or a web file: attributes that identify its content, if there are any."""

    @property
    def tick(self) -> float:
        """Seconds that two changes of the file must lie apart to have different times."""
        if self.stat is None:
            return 0.0
        return TICK if self.stat[3] % 1_000_000_000 else COARSE_TICK


@dataclass(frozen=True)
class HashedFiles:
    """Input files with their fingerprints, in the states in which they were hashed."""

    files: list[File]
    states: Mapping[str, FileState]
    """By the files' names."""

    def check_unchanged(self, files: Sequence[File]) -> None:
        """Raise an error if some of the files were written since they were hashed."""
        states = _states(files)
        _raise_changed([file.name for file in files if states[file.name] != self.states[file.name]])


def hash_files(files: Sequence[File], *, rehash: bool = False) -> HashedFiles:
    """Return the files with their fingerprints and checksums; `rehash` ignores cached hashes."""
    states = _states(files)
    _raise_changed([file.name for file in files if states[file.name].size != file.size])
    with _open_cache() as cache:
        known: dict[str, ContentHash] = {}
        for file in files:
            state = states[file.name]
            if file.fingerprint:  # of standard input
                known[file.name] = ContentHash(file.fingerprint, file.checksums)
            elif state.version is not None:
                digest = hashlib.sha256(state.version.encode())
                known[file.name] = ContentHash(name_content(digest))
            elif not rehash and (cached := cache.get(state)) is not None:
                known[file.name] = cached
        todo = [file for file in files if file.name not in known]
        if todo:
            time.sleep(max(states[file.name].tick for file in todo))
            _hash(todo, states, known, cache)
    hashed = []
    for file in files:
        content = known[file.name]
        hashed.append(replace(file, fingerprint=content.fingerprint, checksums=content.checksums))
    return HashedFiles(hashed, states)


def _hash(
    files: Sequence[File],
    states: Mapping[str, FileState],
    known: dict[str, ContentHash],
    cache: HashCache,
) -> None:
    """Read the files, and add their hashes to the known and the cached ones."""
    size = sum(file.size for file in files)
    changed = []
    with (
        Progress("hashing the inputs", total=size, unit="B") as progress,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for file, (content, state) in zip(files, pool.map(_hash_file, files), strict=True):
            known[file.name] = content
            if state == states[file.name]:
                cache.put(state, content)
            else:
                changed.append(file.name)
            progress.advance(file.size, files=1)
    _raise_changed(changed)


def _raise_changed(names: Sequence[str]) -> None:
    if names:
        raise changed_inputs_error(names)


def information(name: str) -> dict[str, Any]:
    """Return the attributes of an object or a web file."""
    if web.is_web(name):
        return web.information(name)
    return remote.request("read", name, lambda fs, path: dict(fs.info(path)))


class HashCache:
    """Hashes of files by their states, in an SQLite database in the user's cache folder. A damaged
    entry is none: the file is hashed again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.database = sqlite3.connect(path, timeout=30)
        self.database.execute(
            "create table if not exists contents (file text primary key, state text, "
            "fingerprint text, block_bytes integer, crcs blob, digest text)"
        )

    def get(self, state: FileState) -> ContentHash | None:
        """Return the cached hash of a file in this state."""
        if state.stat is None:
            return None
        key = _columns(state)
        try:
            row = self.database.execute(
                "select fingerprint, block_bytes, crcs, digest from contents "
                "where file = ? and state = ?",
                key,
            ).fetchone()
        except sqlite3.Error as error:
            log.warning("the cache of hashes of inputs cannot be read: %s", error)
            return None
        if row is None or _digest(*key, *row[:-1]) != row[-1]:
            return None
        fingerprint, block_bytes, crcs, _ = row
        return ContentHash(fingerprint, BlockChecksums(state.size, block_bytes, crcs))

    def put(self, state: FileState, content: ContentHash) -> None:
        sums = content.checksums
        if state.stat is None or state.size < MIN_CACHED_BYTES or sums is None:
            return
        entry = (*_columns(state), content.fingerprint, sums.block_bytes, sums.crcs)
        try:
            with self.database:
                self.database.execute(
                    "insert or replace into contents values (?, ?, ?, ?, ?, ?)",
                    (*entry, _digest(*entry)),
                )
        except sqlite3.Error as error:
            log.warning("the cache of hashes of inputs cannot be written: %s", error)


def _columns(state: FileState) -> tuple[str, str]:
    assert state.stat is not None
    device, inode, *times = state.stat
    return f"{device}:{inode}", ":".join(map(str, (state.size, *times)))


def _digest(*entry: str | int | bytes) -> str:
    """Return the hash of an entry: SQLite has no checksums."""
    return hashlib.sha256("\n".join(map(str, entry)).encode()).hexdigest()


class NoHashCache(HashCache):
    """No cache: used if the database cannot be opened."""

    def __init__(self) -> None:
        pass

    def get(self, state: FileState) -> ContentHash | None:
        return None

    def put(self, state: FileState, content: ContentHash) -> None:
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


def _states(files: Sequence[File]) -> dict[str, FileState]:
    size = 1 + len(files) // (8 * READERS)  # files of a thread's task: there may be millions
    parts = [files[first : first + size] for first in range(0, len(files), size)]
    with ThreadPoolExecutor(READERS) as pool:
        states = pool.map(lambda part: [(file.name, _state(file)) for file in part], parts)
        return dict(chain.from_iterable(states))


def _state(file: File) -> FileState:
    if not storage.is_local(file.place):
        return _object_state(file)
    with open_file(file.place) as stream:  # a network file system asks its server when a file opens
        return _state_of(stream)


def _state_of(stream: BinaryIO) -> FileState:
    """Return the state of a local file that is open."""
    stat = os.fstat(stream.fileno())
    return FileState(
        stat.st_size, stat=(stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    )


def _hash_file(file: File) -> tuple[ContentHash, FileState]:
    """Return the hash of a file's content, and the file's state after it was read."""
    block_bytes = choose_block_bytes(file.size)
    with open_file(file.place) as stream:
        content = hash_content(iter(partial(stream.read, block_bytes), b""), block_bytes)
        if storage.is_local(file.place):
            return content, _state_of(stream)
    return content, _object_state(file)


def _object_state(file: File) -> FileState:
    info = information(file.name)
    size = int(info.get("size") or 0)
    if hub.is_hub(file.name) and (content := hub.content_hash(info)) is not None:
        return FileState(size, version=f"{size} {content}")
    for key in CONTENT_KEYS:
        if info.get(key):
            return FileState(size, version=f"{size} {info[key]}")
    for key in VERSION_KEYS:
        if info.get(key):
            # An S3 tag is derived from the content; other tags are unique within one name only.
            same_anywhere = key == "ETag" and file.name.startswith(("s3://", "s3a://"))
            name = "" if same_anywhere else file.name
            return FileState(size, version=f"{name} {size} {info[key]}")
    return FileState(size)
