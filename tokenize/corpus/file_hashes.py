"""What names a file's content: equal for files of equal content, and for no others.

A local file is hashed, all of it. A terabyte takes long, and adding one file to it must not, so
that hashes are remembered, by what the file system changes whenever a file is written: inode, size,
and the times of the last change in nanoseconds, one of which nobody can set. What has changed only
just now is not remembered, since a change within the same tick of the clock would go unseen.

Of an object in a store, the store's own word is taken: its tag or version.
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
from ...dataplane.storage import remote, storage
from ..sources import BLOCK_BYTES, File, web
from ..sources.files import open_file

log = get_logger(__name__)

READERS = 8
"""Files that are hashed at once."""
WORTH_IT = 1 << 20
"""Bytes of a file whose hash is remembered: a smaller one is hashed as fast as it is looked up."""
GRAIN = 2.0
"""Seconds within which two changes may have the same time, on the coarsest of file systems."""

CONTENT = ("md5Hash", "Content-MD5")
"""What a store says of an object that is a hash of its content and nothing else."""
VERSIONS = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified")
"""What changes when an object under the same name does. Two names may share it by chance."""

State = tuple[int, int, int, int, int]
"""Of a local file: device, inode, size, and when its content and anything of it last changed."""


def fingerprinted(files: Sequence[File], *, again: bool = False) -> list[File]:
    """The files with their fingerprints; `again`: hash what is remembered, too."""
    with _memory() as memory:
        known: dict[str, str] = {}
        for file in [] if again else files:
            if mark := memory.recall(_state(file.name)):
                known[file.name] = mark
        todo = [file for file in files if file.name not in known]
        with (
            Progress(
                "hashing the inputs", total=sum(file.size for file in todo), unit="B"
            ) as progress,
            ThreadPoolExecutor(READERS) as pool,
        ):
            for file, (mark, state) in zip(todo, pool.map(_fingerprint, todo), strict=True):
                known[file.name] = mark
                memory.keep(state, mark)
                progress.advance(file.size, files=1)
    return [replace(file, fingerprint=known[file.name]) for file in files]


def check_unchanged(files: Sequence[File], since: float) -> None:
    """That no file was written while it was read, since a point in time."""
    with ThreadPoolExecutor(READERS) as pool:
        found = zip(files, pool.map(lambda file: _changed(file, since), files), strict=True)
        changed = [file.name for file, is_changed in found if is_changed]
    if changed:
        raise InputError(
            f"{len(changed)} inputs were changed while they were read: {', '.join(changed[:10])}",
            hint="build from files that are finished",
        )


def _changed(file: File, since: float) -> bool:
    state = _state(file.name)
    if state is not None:
        return state[4] / 1e9 > since
    version = _version(file)
    return version is not None and _name_of([version.encode()]) != file.fingerprint


def information(name: str) -> dict[str, Any]:
    """What a store says of an object."""
    if web.is_web(name):
        return web.information(name)
    return remote.request("read", name, lambda fs, path: dict(fs.info(path)))


class Memory:
    """The hashes of files by their states, in a database of the person's own cache folder."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.database = sqlite3.connect(path, timeout=30)
        self.database.execute(
            "create table if not exists files (file text primary key, state text, hash text)"
        )

    def recall(self, state: State | None) -> str | None:
        """The hash of a file that is still as it was."""
        if state is None:
            return None
        row = self.database.execute(
            "select hash from files where file = ? and state = ?", _columns(state)
        ).fetchone()
        return None if row is None else str(row[0])

    def keep(self, state: State | None, mark: str) -> None:
        if state is None or state[2] < WORTH_IT or time.time() - state[4] / 1e9 < GRAIN:
            return
        with self.database:
            self.database.execute(
                "insert or replace into files values (?, ?, ?)", (*_columns(state), mark)
            )


def _columns(state: State) -> tuple[str, str]:
    return ":".join(map(str, state[:2])), ":".join(map(str, state[2:]))


class NoMemory(Memory):
    """Where there is none to be had."""

    def __init__(self) -> None:
        pass

    def recall(self, state: State | None) -> str | None:
        return None

    def keep(self, state: State | None, mark: str) -> None:
        pass


def cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "headrace-tokenize" / "fingerprints.sqlite"


@contextlib.contextmanager
def _memory() -> Iterator[Memory]:
    try:
        memory = Memory(cache_file())
    except (OSError, sqlite3.Error) as error:
        log.info("hashes of inputs are not remembered: %s", error)
        yield NoMemory()
        return
    with contextlib.closing(memory.database):
        yield memory


def _state(name: str) -> State | None:
    if not storage.is_local(name):
        return None
    try:
        found = storage.local_path(name).stat()
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _fingerprint(file: File) -> tuple[str, State | None]:
    """The fingerprint of a file, and the state in which it has it."""
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
    """What a store says of an object that is as good as a hash of it, if it says anything."""
    info = information(file.name)
    for key in CONTENT:
        if info.get(key):
            return f"{file.size} {info[key]}"
    for key in VERSIONS:
        if info.get(key):
            # S3's tag is made from the content; anyone else's says something of one name only.
            same_anywhere = key == "ETag" and file.name.startswith(("s3://", "s3a://"))
            return f"{'' if same_anywhere else file.name} {file.size} {info[key]}"
    return None
