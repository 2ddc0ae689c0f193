"""The cache: verified chunks of remote shards on a local disk, bounded, shared by processes.

    folder/.headrace-cache        says that the folder is ours, and how many bytes it holds
    folder/.headrace-turns        who fetches which chunk right now
    folder/<shard's hash>/<n>     chunk n of that shard

A chunk is a file that appears by one rename after its hash was checked, so that a killed process
leaves nothing half done, and no reader needs a lock; each process checks it once more when it first
reads it. Writers take a lock (flock, which ends with its process) to keep the bound. What goes
first when room is needed: what no prefetch of this process waits for, the longest unread first;
then what it will need last.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..console.errors import ConfigError, IntegrityError, Problem, StorageError
from ..console.log import get_logger
from . import storage
from .manifest import CHUNK_BYTES, Shard
from .shard_file import MEND, Bytes, check_chunk, check_chunk_table

log = get_logger(__name__)

MARKER = ".headrace-cache"
TURNS = ".headrace-turns"
UNKNOWN = -1
NOTHING = np.empty(0, np.uint8)
DEFAULT_BYTES = 64 << 30
CHUNK_NAME = re.compile(r"^[0-9a-f]{64}/[0-9]+$")
HALF_NAME = re.compile(r"^[0-9a-f]{64}/\.[0-9]+\.[0-9a-f]{8}$")
Wanted = dict[tuple[str, int], int]
"""Chunks (a shard's hash and a number) and the step that needs each last."""
TOUCH_SECONDS = 30.0
EVICT_PART = 20
"""Each eviction frees this part of the bound: it looks at every chunk, so it should be seldom."""


class Cache:
    def __init__(self, folder: str | Path | None = None, *, max_bytes: int = DEFAULT_BYTES) -> None:
        """The folder is made, or refused, when the first chunk is asked for."""
        self.folder = default_folder() if folder is None else Path(folder)
        self.max_bytes = max_bytes
        self.fetched_bytes = 0
        self.requests = 0
        self.wanted: list[Wanted] = []
        """What each prefetcher of this process waits for."""
        self._counters = threading.Lock()
        self._flights: dict[Path, threading.Lock] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.folder, self.max_bytes))

    def path(self, shard: Shard, number: int) -> Path:
        return self.folder / shard.hash / str(number)

    def chunk(self, url: str, shard: Shard, number: int) -> Bytes:
        """One chunk, checked: from the disk, or from its home."""
        kept = self._load(shard, number)
        if kept is not None:
            return kept
        with self._turn(self.path(shard, 0 if shard.stored_name else number)):
            kept = self._load(shard, number)  # somebody else may have brought it meanwhile
            if kept is not None:
                return kept
            with self._locked() as usage:  # what is there is not what it was
                usage.bytes -= _remove(self.path(shard, number))
            if shard.stored_name:
                return self._unpack(url, shard)[number]
            return self._fetch(url, shard, number)

    def fetch(self, url: str, shard: Shard, number: int) -> None:
        """Have one chunk on the disk."""
        if not self._has(shard, number):
            self.chunk(url, shard, number)

    def piece(self, shard: Shard, number: int, start: int, end: int) -> Bytes | None:
        """A part of a chunk, if it is on the disk; whoever asks has had the chunk checked."""
        try:
            with self.path(shard, number).open("rb") as file:
                file.seek(start)
                data = file.read(end - start)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(error) from None
        return np.frombuffer(data, np.uint8) if len(data) == end - start else None

    def _has(self, shard: Shard, number: int) -> bool:
        self._claimed  # noqa: B018
        path = self.path(shard, number)
        try:
            status = path.stat()
            if time.time() - status.st_mtime > TOUCH_SECONDS:
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreadable(error) from None
        return True

    def _load(self, shard: Shard, number: int) -> Bytes | None:
        """A chunk from the disk, if it is there and still what it was: a power cut can lose what
        was not yet written out, and disks rot."""
        if not self._has(shard, number):
            return None
        size = min(CHUNK_BYTES, shard.size - number * CHUNK_BYTES)
        kept = self.piece(shard, number, 0, size)
        try:
            if kept is not None:
                check_chunk(str(self.path(shard, number)), shard, number, kept)
                return kept
        except IntegrityError as error:
            log.warning("%s; it is fetched again", error.what)
        return None

    def _fetch(self, url: str, shard: Shard, number: int) -> Bytes:
        where = storage.join(url, shard.name)
        start = number * CHUNK_BYTES
        data = storage.read(where, start, min(start + CHUNK_BYTES, shard.size))
        self._count(len(data))
        chunk = np.frombuffer(data, np.uint8)
        check_chunk(where, shard, number, chunk)
        self._keep(self.path(shard, number), data)
        return chunk

    def _unpack(self, url: str, shard: Shard) -> list[Bytes]:
        """The chunks of a compressed shard: it is fetched and checked whole."""
        import zstandard

        assert shard.stored_name is not None
        where = storage.join(url, shard.stored_name)
        packed = storage.read(where)
        self._count(len(packed))
        if hashlib.sha256(packed).hexdigest() != shard.stored_hash:
            raise IntegrityError(f"{where} is damaged", mend=MEND)
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=shard.size)
        chunks = []
        for number, start in enumerate(range(0, shard.size, CHUNK_BYTES)):
            part = data[start : start + CHUNK_BYTES]
            chunks.append(np.frombuffer(part, np.uint8))
            check_chunk(where, shard, number, chunks[-1])
            self._keep(self.path(shard, number), part)
        return chunks

    def _count(self, size: int) -> None:
        with self._counters:
            self.fetched_bytes += size
            self.requests += 1

    def _keep(self, path: Path, data: bytes) -> None:
        """Put a chunk on the disk, if the bound leaves room for it."""
        if len(data) > self.max_bytes:
            return
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            with self._locked() as usage:
                if path.exists():
                    return
                over = usage.bytes + len(data) - self.max_bytes
                if over > 0:
                    usage.bytes -= self._evict(max(over, self.max_bytes // EVICT_PART), path)
                path.parent.mkdir(exist_ok=True)
                temporary.write_bytes(data)
                temporary.rename(path)
                usage.bytes += len(data)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            mend = "free some space, or put the cache on another disk"
            raise StorageError(f"cannot write the cache: {error}", mend=mend) from None

    def _evict(self, needed: int, keep: Path) -> int:
        """Remove chunks until `needed` bytes are free; returns how many were freed."""
        found = []
        for path in self._chunks():
            status = path.stat()
            name = (path.parent.name, int(path.name))
            steps = [wanted[name] for wanted in self.wanted if name in wanted]
            order = (1, -min(steps)) if steps else (0, status.st_mtime)
            found.append((order, path))
        freed = 0
        for _, path in sorted(found):
            if freed >= needed:
                break
            if path != keep:
                freed += _remove(path)
        return freed

    def _chunks(self) -> Iterator[Path]:
        for path in self.folder.glob("*/*"):
            if CHUNK_NAME.match(path.relative_to(self.folder).as_posix()):
                yield path

    @cached_property
    def _claimed(self) -> BinaryIO:
        """The file of turns, in a folder that is ours: one of somebody else is refused."""
        marker = self.folder / MARKER
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()) and not marker.exists():  # asked in this order: others
                raise ConfigError(  # may be making it theirs, marker first
                    "the cache",
                    [Problem("", f"{self.folder} is not empty and is not a headrace cache")],
                    mend="name a folder of its own",
                )
            marker.touch()
            with self._locked() as usage:
                if usage.bytes > self.max_bytes:
                    usage.bytes -= self._evict(usage.bytes - self.max_bytes, marker)
            return (self.folder / TURNS).open("a+b")
        except OSError as error:
            raise StorageError(f"cannot use the cache: {error}", where=str(self.folder)) from None

    @contextmanager
    def _turn(self, path: Path) -> Iterator[None]:
        """One fetch of a chunk at a time: among threads by a lock, among processes by a lock on
        a byte of a file. That lock belongs to the open file (OFD): it ends with its process, and
        two processes whose threads wait for each other's bytes are no deadlock."""
        with self._counters:
            flight = self._flights.setdefault(path, threading.Lock())
        byte = int(path.parent.name[:8], 16) + int(path.name)

        def lock(kind: int) -> None:
            request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
            fcntl.fcntl(self._claimed, fcntl.F_OFD_SETLKW, request)

        with flight:
            lock(fcntl.F_WRLCK)
            try:
                yield
            finally:
                lock(fcntl.F_UNLCK)
                with self._counters:
                    self._flights.pop(path, None)

    @contextmanager
    def _locked(self) -> Iterator[Usage]:
        """The bytes in the cache, ours to change. While they change they are marked unknown, so
        that whoever comes after a killed process counts them again."""
        with (self.folder / MARKER).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            raw = file.read(8)
            value = struct.unpack("<q", raw)[0] if len(raw) == 8 else UNKNOWN
            usage = Usage(self._recount() if value == UNKNOWN else value)
            _write(file.fileno(), UNKNOWN)
            yield usage
            _write(file.fileno(), usage.bytes)

    def _recount(self) -> int:
        for path in self.folder.glob("*/.*"):
            if HALF_NAME.match(path.relative_to(self.folder).as_posix()):
                path.unlink(missing_ok=True)
        return sum(path.stat().st_size for path in self._chunks())


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "headrace"


def _reopen(folder: Path, max_bytes: int) -> Cache:
    return Cache(folder, max_bytes=max_bytes)


class Usage:
    """Bytes in the cache, while its lock is held."""

    def __init__(self, size: int) -> None:
        self.bytes = size


class CachedShardFile:
    """A shard read through the cache."""

    def __init__(self, url: str, shard: Shard, cache: Cache) -> None:
        check_chunk_table(storage.join(url, shard.name), shard)
        self.url, self.shard, self.cache = url, shard, cache
        self.unchecked = bytearray(b"\1" * (len(shard.chunks) // 32))

    def read(self, start: int, end: int) -> Bytes:
        parts = []
        for number in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            base = number * CHUNK_BYTES
            low, high = max(start - base, 0), min(end - base, CHUNK_BYTES)
            piece = None
            if not self.unchecked[number]:
                piece = self.cache.piece(self.shard, number, low, high)
            if piece is None:
                piece = self.cache.chunk(self.url, self.shard, number)[low:high]
                self.unchecked[number] = 0
            parts.append(piece)
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, NOTHING])


def _remove(path: Path) -> int:
    """Remove a chunk that others may be removing, too; returns how many bytes that freed."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def _unreadable(error: OSError) -> StorageError:
    return StorageError(f"cannot read the cache: {error.strerror}", where=error.filename)


def _write(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, struct.pack("<q", value), 0)
