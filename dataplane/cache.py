"""The cache: verified chunks of remote shards on a local disk, bounded, shared by processes.

    folder/.headrace-cache        says that the folder is ours, and how many bytes it holds
    folder/.headrace-turns        who fetches which chunk right now
    folder/<shard's hash>/<n>     chunk n of that shard

A chunk is a file that appears by one rename after its hash was checked, so that a killed process
leaves nothing half done, and no reader needs a lock. Writers take one (flock, which ends with its
process) to keep the bound. What goes first when room is needed: what no prefetch of this process
waits for, the longest unread first; then what it will need last.
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
from . import storage
from .manifest import CHUNK_BYTES, Shard
from .shard_file import MEND, Bytes, check_chunk, check_chunk_table

MARKER = ".headrace-cache"
TURNS = ".headrace-turns"
UNKNOWN = -1
DEFAULT_BYTES = 64 << 30
CHUNK_NAME = re.compile(r"^[0-9a-f]{64}/[0-9]+$")
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
        self.wanted: dict[tuple[str, int], int] = {}
        """Chunks that a prefetch of this process has asked for: the step that needs each last."""
        self._counters = threading.Lock()
        self._flights: dict[Path, threading.Lock] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.folder, self.max_bytes))

    def path(self, shard: Shard, number: int) -> Path:
        return self.folder / shard.hash / str(number)

    def chunk(self, url: str, shard: Shard, number: int) -> Bytes:
        """One chunk, from the disk or from its home. It is verified before it enters the cache."""
        turns = self._turns  # the folder is ours from here on
        cached = self._load(shard, number)
        if cached is not None:
            return cached
        whole = shard.stored_name is not None
        with self._turn(turns, self.path(shard, 0 if whole else number)):
            cached = self._load(shard, number)  # somebody else may have brought it meanwhile
            if cached is not None:
                return cached
            return self._unpack(url, shard)[number] if whole else self._fetch(url, shard, number)

    def _fetch(self, url: str, shard: Shard, number: int) -> Bytes:
        where = storage.join(url, shard.name)
        start = number * CHUNK_BYTES
        data = storage.read(where, start, min(start + CHUNK_BYTES, shard.size))
        self._count(len(data))
        chunk = np.frombuffer(data, np.uint8)
        check_chunk(where, shard, number, chunk)
        self._keep(self.path(shard, number), data)
        return chunk

    def _load(self, shard: Shard, number: int) -> Bytes | None:
        path = self.path(shard, number)
        expected = min(CHUNK_BYTES, shard.size - number * CHUNK_BYTES)
        try:
            status = path.stat()
            if status.st_size != expected:  # a power cut can lose what was not yet on the disk
                return None
            if time.time() - status.st_mtime > TOUCH_SECONDS:
                os.utime(path)
            return np.memmap(path, np.uint8, "r")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read the cache: {error}", where=str(path)) from None

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
            step = self.wanted.get((path.parent.name, int(path.name)))
            order = (0, status.st_mtime) if step is None else (1, -step)
            found.append((order, path, status.st_size))
        freed = 0
        for _, path, size in sorted(found):
            if freed >= needed:
                break
            if path != keep:
                path.unlink()
                freed += size
        return freed

    def _chunks(self) -> Iterator[Path]:
        for path in self.folder.glob("*/*"):
            if CHUNK_NAME.match(path.relative_to(self.folder).as_posix()):
                yield path

    @cached_property
    def _turns(self) -> BinaryIO:
        """Makes the folder ours, or refuses one that is somebody else's."""
        marker = self.folder / MARKER
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not marker.exists():
                if any(self.folder.iterdir()):
                    raise ConfigError(
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
    def _turn(self, turns: BinaryIO, path: Path) -> Iterator[None]:
        """One fetch of a chunk at a time: among threads by a lock, among processes by a lock on
        a byte of a file, which ends with its process."""
        with self._counters:
            flight = self._flights.setdefault(path, threading.Lock())
        byte = int(path.parent.name[:8], 16) + int(path.name)
        with flight:
            fcntl.lockf(turns, fcntl.LOCK_EX, 1, byte)
            try:
                yield
            finally:
                fcntl.lockf(turns, fcntl.LOCK_UN, 1, byte)
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
        self._recent: dict[int, Bytes] = {}

    def read(self, start: int, end: int) -> Bytes:
        first, last = start // CHUNK_BYTES, max(-(-end // CHUNK_BYTES), start // CHUNK_BYTES + 1)
        parts = []
        for number in range(first, last):
            chunk = self._chunk(number)
            base = number * CHUNK_BYTES
            parts.append(chunk[max(start - base, 0) : end - base])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _chunk(self, number: int) -> Bytes:
        chunk = self._recent.get(number)
        if chunk is None:
            if len(self._recent) >= 64:
                self._recent.clear()
            chunk = self._recent[number] = self.cache.chunk(self.url, self.shard, number)
        return chunk


def _write(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, struct.pack("<q", value), 0)
