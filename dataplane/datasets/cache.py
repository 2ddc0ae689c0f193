"""The cache: verified chunks of remote shards on a local disk.

A chunk is hashed before it is written to the cache, and again if its file has changed since, or the
machine has restarted: a power cut can lose data that was not synced, and disks rot. The processes
of a machine know of each other's checks (`CheckedFiles`). Chunks are read where they are mapped
(`ChunkMap`). Adjacent chunks are fetched by one request. Other threads and processes
that need one of them wait for it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np

from ...console.errors import IntegrityError
from ...console.log import get_logger
from ..arrays import Bytes
from ..shards.compression import unpack
from ..storage import storage
from ..storage.verified import read_checked
from .cache_folder import CacheFolder, unreadable
from .chunks import CHUNK_BYTES, RESTORE, ChunkMap, check_chunk, check_stored, damage, spans
from .manifest import Shard

log = get_logger(__name__)

DEFAULT_BYTES = 64 << 30


MOST_MAPPED = 1 << 14
"""Chunks that a process maps, 4 GiB; the kernel allows it about 65,000 maps."""


class MappedFile(Protocol):
    """A shard's file whose chunks are mapped."""

    shard: Shard

    def unmap(self) -> None:
        """Forget all maps."""


class Cache:
    """A cache on a local disk, shared by the threads and processes of a machine."""

    def __init__(self, folder: str | Path | None = None, *, max_bytes: int = DEFAULT_BYTES) -> None:
        """The folder is created, or refused, when the first chunk is read."""
        self.folder = CacheFolder(default_folder() if folder is None else Path(folder), max_bytes)
        self.fetched_bytes = 0
        self.requests = 0
        self._in_flight: set[tuple[str, int]] = set()
        """Chunks that threads of this process are fetching."""
        self._landed = threading.Condition()
        self._mapped: WeakSet[MappedFile] = WeakSet()
        self._maps = 0
        """Chunks mapped since all were unmapped."""
        self._mapping = threading.Lock()
        self._evictions: object = None

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.folder.root, self.folder.max_bytes))

    def chunks(self, url: str, shard: Shard, first: int, last: int) -> list[Bytes]:
        """Return the verified chunks [first, last) of a shard, from the disk or from its store."""
        loaded: dict[int, Bytes] = {}

        def missing() -> list[int]:
            numbers = [number for number in range(first, last) if number not in loaded]
            chunks = ((number, self._load(shard, number)) for number in numbers)
            loaded.update((number, chunk) for number, chunk in chunks if chunk is not None)
            return [number for number in numbers if number not in loaded]

        if missing():
            with self._fetching(shard, first, last):
                still = missing()  # another thread or process may have fetched some
                self.folder.remove(shard, still)  # chunks on the disk that failed verification
                if still and shard.stored_name:
                    loaded = self._unpack(url, shard)
                else:
                    for start, end in spans(still):
                        loaded |= self._fetch(url, shard, start, end)
        return [loaded[number] for number in range(first, last)]

    def fetch(self, url: str, shard: Shard, first: int, last: int) -> None:
        """Fetch the chunks [first, last) of a shard that are not on the disk."""
        missing = (number for number in range(first, last) if not self.folder.has(shard, number))
        for start, end in spans(missing):
            self.chunks(url, shard, start, end)

    def map(self, file: MappedFile, chunks: ChunkMap, number: int) -> bool:
        """Map a chunk of a file, verified; False if it is not on the disk, or damaged there."""
        shard = file.shard
        if not self.folder.has(shard, number):
            return False
        is_valid = partial(self.folder.is_valid, shard, number)
        path = self.folder.path(shard, number)
        try:
            if not chunks.add(number, str(path), is_valid):
                return False
        except OSError as error:
            raise unreadable(error) from None
        with self._mapping:
            self._mapped.add(file)
            self._maps += 1
        return True

    def unmap_evicted(self) -> None:
        """Unmap all chunks if some were evicted since the last call, or too many are mapped: those
        still in use are mapped again."""
        evictions = self.folder.evictions()
        with self._mapping:
            if evictions == self._evictions and self._maps <= MOST_MAPPED:
                return
            self._evictions, self._maps = evictions, 0
            files = list(self._mapped)
            self._mapped.clear()
        for file in files:
            file.unmap()

    def _load(self, shard: Shard, number: int) -> Bytes | None:
        """Read and verify a chunk from the disk; None if it is missing or damaged."""
        if not self.folder.has(shard, number):
            return None
        kept = self.folder.read(shard, number)
        if kept is None:
            return None
        data, is_valid = kept
        if not is_valid:
            path = self.folder.path(shard, number)
            log.warning("%s; fetching it again", damage(str(path), shard, number))
        return data if is_valid else None

    def _fetch(self, url: str, shard: Shard, first: int, last: int) -> dict[int, Bytes]:
        where = storage.join(url, shard.name)
        start, end = first * CHUNK_BYTES, last * CHUNK_BYTES
        if end >= shard.size:
            end = shard.size + 1  # one byte more, to detect a file that has grown

        def check(data: bytes) -> dict[int, Bytes]:
            self._count(len(data))
            if start + len(data) > shard.size:
                raise IntegrityError(
                    f"{where} has more bytes than its manifest says ({shard.size:,})", hint=RESTORE
                )
            return self._checked(where, shard, first, last, data)

        return read_checked(where, check, start, end)

    def _unpack(self, url: str, shard: Shard) -> dict[int, Bytes]:
        """Fetch, verify and decompress a whole compressed shard; return its chunks."""
        assert shard.stored_name is not None
        where = storage.join(url, shard.stored_name)

        def check(packed: bytes) -> bytes:
            self._count(len(packed))
            return check_stored(where, shard, packed)

        packed = read_checked(where, check)
        data = unpack(where, packed, shard.size, shard.details)
        return self._checked(where, shard, 0, -(-shard.size // CHUNK_BYTES), data)

    def _checked(
        self, where: str, shard: Shard, first: int, last: int, data: bytes
    ) -> dict[int, Bytes]:
        """Split bytes into the chunks [first, last), verify them and write them to the cache."""
        whole, chunks = np.frombuffer(data, np.uint8), {}
        try:
            for place, number in enumerate(range(first, last)):
                chunk = whole[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
                check_chunk(where, shard, number, chunk)
                chunks[number] = chunk
        finally:
            # Those before a damaged one are verified.
            self.folder.keep(shard, chunks)
        return chunks

    def _count(self, size: int) -> None:
        with self._landed:
            self.fetched_bytes += size
            self.requests += 1

    @contextmanager
    def _fetching(self, shard: Shard, first: int, last: int) -> Iterator[None]:
        """Allow one fetch of a chunk at a time: a set excludes threads, a lock on bytes of a file
        excludes processes. The lock belongs to the open file (OFD), so it ends with its process,
        and two processes whose threads wait for each other's bytes do not deadlock."""
        if shard.stored_name:
            first, last = 0, 1  # one byte locks the whole shard
        names = {(shard.hash, number) for number in range(first, last)}
        locks = self.folder.lock_file

        def lock(kind: int) -> None:
            byte = int(shard.hash[:8], 16) + first
            request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, last - first, 0)
            fcntl.fcntl(locks, fcntl.F_OFD_SETLKW, request)

        with self._landed:
            self._landed.wait_for(lambda: self._in_flight.isdisjoint(names))
            self._in_flight |= names
        try:
            lock(fcntl.F_WRLCK)
            yield
        finally:
            lock(fcntl.F_UNLCK)
            with self._landed:
                self._in_flight -= names
                self._landed.notify_all()


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "headrace"


def _reopen(folder: Path, max_bytes: int) -> Cache:
    return Cache(folder, max_bytes=max_bytes)
