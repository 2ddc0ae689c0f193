"""Fingerprints of input files: files with equal content have the same fingerprint.

Local files are hashed in full. Hashing a terabyte is slow, and adding a file to it must not be, so
hashes are cached. Keys are what the file system changes on every write: inode, size, and times of
the last change in nanoseconds (mtime, and ctime, which no user can set). This state is compared
again after a build has read its inputs, and the content during the read (checksums.py). The
machine's clock is never used: it may be wrong, and file times may come from a server's clock.

Two changes within one tick of the file system's clock have the same time. So a tick passes between
taking a file's state and reading the first byte: any later write changes the state. (Stores through
a memory map change it when the kernel writes the page back.)

Objects in a store get a fingerprint from the store's tag or version. Their content is not read, and
has no checksums.
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
from .checksums import (
    BlockChecksums,
    ContentHash,
    changed_inputs_error,
    choose_block_bytes,
    hash_content,
    name_content,
)
from .input_file import File, is_web
from .open_file import open_file

log = get_logger(__name__)

READERS = 8
"""Files hashed at the same time."""
MIN_CACHED_BYTES = 1 << 20
"""Lower bound on the size of cached files: hashing a smaller file is as fast as a lookup."""
TABLE = "block_checksums"
"""Table of the cache. Its predecessors, `contents` and `file_contents`, had CRCs of blocks."""
TICK = 0.02
"""Seconds within which two changes may get the same time."""
COARSE_TICK = 2.0
"""The same, for file systems with times in whole seconds."""

CONTENT_KEYS = ("md5Hash", "Content-MD5")
"""Attributes that hash an object's content alone."""
VERSION_KEYS = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified")
"""Attributes that change with the object. Objects with different names may share a value."""


@dataclass(frozen=True)
class FileState:
    """Attributes that change whenever the file does."""

    size: int
    stat: tuple[int, int, int, int] | None = None
    """For local files: device, inode, mtime and ctime in nanoseconds."""
    version: str | None = None
    """For objects and web files: attributes that identify the content, if there are any."""

    @property
    def tick(self) -> float:
        """Seconds between two changes after which they have different times."""
        if self.stat is None:
            return 0.0
        return TICK if self.stat[3] % 1_000_000_000 else COARSE_TICK


@dataclass(frozen=True)
class HashedFiles:
    """Input files with fingerprints, and their states when they were hashed."""

    files: list[File]
    states: Mapping[str, FileState]
    """States by file name."""

    def check_unchanged(self, files: Sequence[File]) -> None:
        """Raise InputError if any of these files was written since it was hashed."""
        states = _states(files)
        _raise_changed([file.name for file in files if states[file.name] != self.states[file.name]])


def hash_files(files: Sequence[File], *, rehash: bool = False) -> HashedFiles:
    """Add fingerprints and checksums to files; `rehash` ignores cached hashes."""
    states = _states(files)
    _raise_changed([file.name for file in files if states[file.name].size != file.size])
    with _open_cache() as cache:
        contents: dict[str, ContentHash] = {}
        for file in files:
            state = states[file.name]
            if file.fingerprint:  # of standard input
                contents[file.name] = ContentHash(file.fingerprint, file.checksums)
            elif state.version is not None:
                digest = hashlib.sha256(state.version.encode())
                contents[file.name] = ContentHash(name_content(digest))
            elif not rehash and (cached := cache.get(state)) is not None:
                contents[file.name] = cached
        unhashed = [file for file in files if file.name not in contents]
        if unhashed:
            time.sleep(max(states[file.name].tick for file in unhashed))
            _hash_unknown(unhashed, states, contents, cache)
    hashed = []
    for file in files:
        content = contents[file.name]
        hashed.append(replace(file, fingerprint=content.fingerprint, checksums=content.checksums))
    return HashedFiles(hashed, states)


def _hash_unknown(
    files: Sequence[File],
    states: Mapping[str, FileState],
    contents: dict[str, ContentHash],
    cache: HashCache,
) -> None:
    """Hash files; add the hashes to `contents` and the cache."""
    size = sum(file.size for file in files)
    changed = []
    with (
        Progress("hashing the inputs", total=size, unit="B") as progress,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for file, (content, state) in zip(files, pool.map(_hash_file, files), strict=True):
            contents[file.name] = content
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
    """Request the attributes of an object or a web file."""
    if is_web(name):
        from .web import request_information  # imports ssl

        return request_information(name)
    return remote.request("read", name, lambda fs, path: dict(fs.info(path)))


class HashCache:
    """Hashes of files by state, in an SQLite database in the user's cache folder. A damaged entry
    counts as missing: the file is hashed again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.database = sqlite3.connect(path, timeout=30)
        self.database.execute(
            f"create table if not exists {TABLE} (file text primary key, state text, "
            "fingerprint text, block_bytes integer, checksums blob, line_feeds blob, digest text)"
        )

    def get(self, state: FileState) -> ContentHash | None:
        """Return the cached hash for a file state, or None."""
        if state.stat is None:
            return None
        key = _columns(state)
        try:
            row = self.database.execute(
                "select fingerprint, block_bytes, checksums, line_feeds, digest "
                f"from {TABLE} where file = ? and state = ?",
                key,
            ).fetchone()
        except sqlite3.Error as error:
            log.warning("the cache of hashes of inputs cannot be read: %s", error)
            return None
        if row is None or _digest(*key, *row[:-1]) != row[-1]:
            return None
        fingerprint, *columns, _ = row
        return ContentHash(fingerprint, BlockChecksums(state.size, *columns))

    def put(self, state: FileState, content: ContentHash) -> None:
        checksums = content.checksums
        if state.stat is None or state.size < MIN_CACHED_BYTES or checksums is None:
            return
        sums = (checksums.block_bytes, checksums.checksums, checksums.line_feeds)
        entry = (*_columns(state), content.fingerprint, *sums)
        try:
            with self.database:
                self.database.execute(
                    f"insert or replace into {TABLE} values (?, ?, ?, ?, ?, ?, ?)",
                    (*entry, _digest(*entry)),
                )
        except sqlite3.Error as error:
            log.warning("the cache of hashes of inputs cannot be written: %s", error)


def _columns(state: FileState) -> tuple[str, str]:
    assert state.stat is not None
    device, inode, *times = state.stat
    return f"{device}:{inode}", ":".join(map(str, (state.size, *times)))


def _digest(*entry: str | int | bytes) -> str:
    """Hash a database entry: SQLite has no checksums."""
    return hashlib.sha256("\n".join(map(str, entry)).encode()).hexdigest()


class NoHashCache(HashCache):
    """Stands in for the cache if the database cannot be opened."""

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
    batch_size = 1 + len(files) // (8 * READERS)  # files of a thread's task: there may be millions
    batches = [files[first : first + batch_size] for first in range(0, len(files), batch_size)]
    with ThreadPoolExecutor(READERS) as pool:
        states = pool.map(lambda batch: [(file.name, _state(file)) for file in batch], batches)
        return dict(chain.from_iterable(states))


def _state(file: File) -> FileState:
    if not storage.is_local(file.place):
        return _object_state(file)
    with open_file(file.place) as stream:  # a network file system asks its server when a file opens
        return _open_file_state(stream)


def _open_file_state(stream: BinaryIO) -> FileState:
    """Return the state of an open local file."""
    stat = os.fstat(stream.fileno())
    return FileState(
        stat.st_size, stat=(stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    )


def _hash_file(file: File) -> tuple[ContentHash, FileState]:
    """Hash a file's content; return the hash, and the file's state after reading."""
    block_bytes = choose_block_bytes(file.size)
    with open_file(file.place) as stream:
        content = hash_content(iter(partial(stream.read, block_bytes), b""), block_bytes)
        if storage.is_local(file.place):
            return content, _open_file_state(stream)
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
