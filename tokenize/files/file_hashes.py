"""Fingerprints of input files: two files have the same fingerprint if their content is equal.

Local files are hashed in full. Hashing a terabyte is slow, and adding one file to it must not be,
so hashes are cached, keyed by what the file system changes on every write: inode, size, and the
times of the last change in nanoseconds (mtime, and ctime, which no user can set). The same state is
compared again when a build has read its inputs. The machine's clock is asked for nothing: it may be
wrong, and the times of a file may come from a server with another clock.

Two changes within one tick of the file system's clock have the same time. Between a file's state
and the first byte that is read, a tick is therefore waited for: whoever writes the file after that
changes its state. (Stores through a memory map change it when the kernel writes the page back.)

For objects in a store, the fingerprint is derived from the store's tag or version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

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
    rehash: bool = False
    """Whether the files are hashed again when they have been read: a file system may not keep the
    times of changes."""

    def check_unchanged(self, files: Sequence[File]) -> None:
        """Raise an error if some of the files were written since they were hashed."""
        states = _states(files)
        _raise_changed([file.name for file in files if states[file.name] != self.states[file.name]])
        if not self.rehash:
            return
        hashed = [file for file in files if states[file.name].stat is not None]
        with ThreadPoolExecutor(READERS) as pool:
            again = pool.map(_fingerprint, hashed)
            pairs = zip(hashed, again, strict=True)
            _raise_changed([file.name for file, (name, _) in pairs if name != file.fingerprint])


def hash_files(files: Sequence[File], *, rehash: bool = False) -> HashedFiles:
    """Return the files with their fingerprints; `rehash` trusts no times of files: it ignores
    cached hashes, and `check_unchanged` compares contents too."""
    states = _states(files)
    _raise_changed([file.name for file in files if states[file.name].size != file.size])
    with _open_cache() as cache:
        known: dict[str, str] = {}
        for file in files:
            state = states[file.name]
            if file.fingerprint:  # of standard input
                known[file.name] = file.fingerprint
            elif state.version is not None:
                known[file.name] = _name_of([state.version.encode()])
            elif not rehash and (fingerprint := cache.get(state)) is not None:
                known[file.name] = fingerprint
        todo = [file for file in files if file.name not in known]
        if todo:
            time.sleep(max(states[file.name].tick for file in todo))
            _hash(todo, states, known, cache)
    hashed = [replace(file, fingerprint=known[file.name]) for file in files]
    return HashedFiles(hashed, states, rehash)


def _hash(
    files: Sequence[File],
    states: Mapping[str, FileState],
    known: dict[str, str],
    cache: HashCache,
) -> None:
    """Read the files, and add their fingerprints to the known and the cached ones."""
    size = sum(file.size for file in files)
    changed = []
    with (
        Progress("hashing the inputs", total=size, unit="B") as progress,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for file, (fingerprint, state) in zip(files, pool.map(_fingerprint, files), strict=True):
            known[file.name] = fingerprint
            if state == states[file.name]:
                cache.put(state, fingerprint)
            else:
                changed.append(file.name)
            progress.advance(file.size, files=1)
    _raise_changed(changed)


def _raise_changed(names: Sequence[str]) -> None:
    if names:
        raise InputError(
            f"{len(names)} inputs changed while they were read: {', '.join(names[:10])}",
            hint="build from files that no program is writing",
        )


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
            "create table if not exists hashes "
            "(file text primary key, state text, hash text, digest text)"
        )

    def get(self, state: FileState) -> str | None:
        """Return the cached hash of a file in this state."""
        if state.stat is None:
            return None
        entry = _columns(state)
        try:
            row = self.database.execute(
                "select hash, digest from hashes where file = ? and state = ?", entry
            ).fetchone()
        except sqlite3.Error as error:
            log.warning("the cache of hashes of inputs cannot be read: %s", error)
            return None
        if row is None or _digest(*entry, row[0]) != row[1]:
            return None
        return str(row[0])

    def put(self, state: FileState, fingerprint: str) -> None:
        if state.stat is None or state.size < MIN_CACHED_BYTES:
            return
        entry = (*_columns(state), fingerprint)
        try:
            with self.database:
                self.database.execute(
                    "insert or replace into hashes values (?, ?, ?, ?)", (*entry, _digest(*entry))
                )
        except sqlite3.Error as error:
            log.warning("the cache of hashes of inputs cannot be written: %s", error)


def _columns(state: FileState) -> tuple[str, str]:
    assert state.stat is not None
    device, inode, *times = state.stat
    return f"{device}:{inode}", ":".join(map(str, (state.size, *times)))


def _digest(*entry: str) -> str:
    """Return the hash of an entry: SQLite has no checksums."""
    return hashlib.sha256("\n".join(map(str, entry)).encode()).hexdigest()


class NoHashCache(HashCache):
    """No cache: used if the database cannot be opened."""

    def __init__(self) -> None:
        pass

    def get(self, state: FileState) -> str | None:
        return None

    def put(self, state: FileState, fingerprint: str) -> None:
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


def _fingerprint(file: File) -> tuple[str, FileState]:
    """Return the hash of a file's content, and the file's state after it was read."""
    with open_file(file.place) as stream:
        hash = _name_of(iter(partial(stream.read, BLOCK_BYTES), b""))
        if storage.is_local(file.place):
            return hash, _state_of(stream)
    return hash, _object_state(file)


def _name_of(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32]


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
