"""The folder of a cache: chunks as files, bounded in bytes, shared by processes.

    folder/.headrace-cache        marks the folder as a cache, and holds its size in bytes
    folder/.headrace-turns        locked by the byte: chunks that are being fetched
    folder/.headrace-evictions    a byte longer after each eviction: readers unmap their chunks
    folder/.headrace-checked      chunks that were verified since the machine started
    folder/<shard's hash>/<n>     chunk n of that shard

A chunk appears by one rename: a killed process leaves no partial chunk, and readers need no lock.
Writers hold one (flock, which ends with its process) to keep the bound. Eviction order: chunks that
no prefetcher waits for, least recently read first; then those needed last. Nothing but chunks is
removed. A folder that is deleted while in use is created again.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...console.errors import ConfigError, Problem, StorageError, file_fault
from ..arrays import Bytes
from ..storage.checked_files import CheckedFiles
from .chunks import hash_of, matches
from .manifest import Shard

MARKER = ".headrace-cache"
LOCKS = ".headrace-turns"
EVICTIONS = ".headrace-evictions"
CHECKED = ".headrace-checked"
UNKNOWN = -1
"""Recorded size while the folder is being changed."""
CHUNK_NAME = re.compile(r"^[0-9a-f]{64}/[0-9]+$")
PARTIAL_NAME = re.compile(r"^[0-9a-f]{64}/\.[0-9]+\.[0-9a-f]{8}$")
TOUCH_SECONDS = 30.0
"""Age of a chunk's access time after which a read renews it."""
EVICT_FRACTION = 20
"""Each eviction frees 1/20 of the bound: it lists every chunk, so it should be rare."""

Wanted = dict[tuple[str, int], int]
"""For each chunk (a shard's hash, a number), the last block of rows that needs it."""


class Usage:
    """Bytes in the folder; exists while its lock is held."""

    def __init__(self, size: int) -> None:
        self.bytes = size


class CacheFolder:
    """The files of a cache; processes may share the folder."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """The folder is created, or refused, on first use."""
        self.root, self.max_bytes = path, max_bytes
        self.checked = CheckedFiles(path / CHECKED)
        self.marked = False
        """True once the marker was seen; from then on a deleted folder is created again."""
        self.wanted: list[Wanted] = []
        """The chunks that each prefetcher of this process waits for."""

    def path(self, shard: Shard, number: int) -> Path:
        return self.root / shard.hash / str(number)

    def has(self, shard: Shard, number: int) -> bool:
        """True if a chunk is on the disk; marks it as recently used."""
        _ = self.lock_file  # creates the folder, or refuses it
        path = self.path(shard, number)
        try:
            status = path.stat()
            if time.time() - status.st_mtime > TOUCH_SECONDS:
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise unreadable(error) from None
        return True

    def is_valid(self, shard: Shard, number: int, data: Bytes, status: os.stat_result) -> bool:
        """True if the bytes of a chunk's file match its hash; hashed once by all processes."""
        if self.checked.has(hash_of(shard, number), status):
            return True
        if not matches(shard, number, data):
            return False
        self.checked.add(hash_of(shard, number), status)
        return True

    def read(self, shard: Shard, number: int) -> tuple[Bytes, bool] | None:
        """Read a chunk, and say whether it is valid; None if it is missing."""
        try:
            with self.path(shard, number).open("rb") as file:
                status = os.fstat(file.fileno())
                data: Bytes = np.frombuffer(file.read(), np.uint8)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(error) from None
        return data, self.is_valid(shard, number, data, status)

    def evictions(self) -> tuple[int, int] | None:
        """Return a value that changes with each eviction by any process."""
        try:
            status = (self.root / EVICTIONS).stat()
        except OSError:  # none so far, or the folder was deleted
            return None
        return status.st_ino, status.st_size

    def keep(self, shard: Shard, chunks: Mapping[int, Bytes]) -> None:
        """Write verified chunks of a shard to the disk, without those that are there and those
        larger than the bound."""
        temporary = None
        try:
            with self.locked() as usage:
                for number, data in chunks.items():
                    path = self.path(shard, number)
                    if path.exists() or data.nbytes > self.max_bytes:
                        continue
                    self._make_room(usage, data.nbytes)
                    path.parent.mkdir(exist_ok=True)
                    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
                    temporary.write_bytes(data.data)
                    temporary.rename(path)
                    usage.bytes += data.nbytes
                    self.checked.add(hash_of(shard, number), path.stat())
        except FileNotFoundError:
            return  # the folder is being deleted; missing chunks are fetched again
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
            hint = "free some space, or put the cache on another disk"
            reason = f"{file_fault(error)[0]} ({error.filename})"
            raise StorageError(f"cannot write the cache: {reason}", hint=hint) from None

    def remove(self, shard: Shard, numbers: Sequence[int]) -> None:
        with self.locked() as usage:
            usage.bytes -= sum(_remove(self.path(shard, number)) for number in numbers)

    @cached_property
    def lock_file(self) -> BinaryIO:
        """The file whose bytes stand for chunks; a process locks those that it fetches."""
        try:
            with self.locked() as usage:  # the bound may have been larger before
                self._make_room(usage, 0)
            return (self.root / LOCKS).open("a+b")
        except OSError as error:
            what = f"cannot use the cache: {error.strerror}"
            raise StorageError(what, where=str(self.root), hint="name another folder") from None

    @contextmanager
    def locked(self) -> Iterator[Usage]:
        """Lock the folder for writing; yield its size in bytes. Meanwhile the recorded size is
        UNKNOWN, so that the successor of a killed process counts again."""
        with self._locked_marker() as file:
            raw = file.read(8)
            value = struct.unpack("<q", raw)[0] if len(raw) == 8 else UNKNOWN
            usage = Usage(self._recount() if value == UNKNOWN else value)
            _write(file.fileno(), UNKNOWN)
            yield usage
            _write(file.fileno(), usage.bytes)

    def _locked_marker(self) -> BinaryIO:
        """Open and lock the marker file; again, if the folder was deleted meanwhile: two writers
        would hold two locks."""
        while True:
            file = self._marker()
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), (self.root / MARKER).stat()):
                    return file
            file.close()

    def _marker(self) -> BinaryIO:
        """Open the marker file; refuse a folder that holds other files and no marker."""
        marker = self.root / MARKER
        while True:
            with suppress(FileNotFoundError):
                file = marker.open("r+b")
                self.marked = True
                return file
            self.root.mkdir(parents=True, exist_ok=True)
            others = not self.marked and any(self.root.iterdir())
            # Check for the marker last: another process may just have created it.
            if others and not marker.exists():
                raise ConfigError(
                    "the cache",
                    [Problem("", f"{self.root} is not empty and is not a headrace cache")],
                    hint="name an empty or a new folder",
                )
            marker.touch()

    def _make_room(self, usage: Usage, size: int) -> None:
        over = usage.bytes + size - self.max_bytes
        if over > 0:
            usage.bytes -= self._evict(max(over, self.max_bytes // EVICT_FRACTION))

    def _evict(self, needed: int) -> int:
        """Remove chunks until `needed` bytes are freed; return the bytes freed."""
        chunks = []
        for path in self._chunks():
            status = path.stat()
            name = (path.parent.name, int(path.name))
            steps = [wanted[name] for wanted in self.wanted if name in wanted]
            order = (1, -min(steps)) if steps else (0, status.st_mtime)
            chunks.append((order, path))
        freed = 0
        for _, path in sorted(chunks):
            if freed >= needed:
                break
            freed += _remove(path)
        with (self.root / EVICTIONS).open("ab") as file:
            file.write(b"\0")
        return freed

    def _chunks(self) -> Iterator[Path]:
        for path in self.root.glob("*/*"):
            if CHUNK_NAME.match(path.relative_to(self.root).as_posix()):
                yield path

    def _recount(self) -> int:
        for path in self.root.glob("*/.*"):
            if PARTIAL_NAME.match(path.relative_to(self.root).as_posix()):
                path.unlink(missing_ok=True)
        return sum(path.stat().st_size for path in self._chunks())


def _remove(path: Path) -> int:
    """Remove a chunk; return the bytes freed."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def unreadable(error: OSError) -> StorageError:
    return StorageError(f"cannot read the cache: {error.strerror}", where=error.filename)


def _write(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, struct.pack("<q", value), 0)
