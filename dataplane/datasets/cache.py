"""The cache: verified chunks of remote shards on a local disk.

A chunk is hashed before it is written to the cache, and again if its file has changed or the
machine has restarted: a power cut can lose unsynced data, and disks rot. Processes on a machine
share the results (`CheckedFiles`). Chunks are read in place, by `mmap` (`ChunkMap`). Adjacent
chunks are fetched by one request and stored in one file; other threads and processes that need them
wait.
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
from ..shards.compression import decompress_shard
from ..storage import storage
from ..storage.verified import read_checked, view_checked
from .cache_folder import CacheFolder, unreadable
from .chunks import (
    CHUNK_BYTES,
    RESTORE_HINT,
    ChunkMap,
    Run,
    check_chunk,
    check_stored,
    damage_message,
    group_runs,
)
from .manifest import Shard

log = get_logger(__name__)

DEFAULT_BYTES = 64 << 30

MAX_MAPPED_CHUNKS = 1 << 14
"""Chunks that a process maps: 4 GiB. The kernel allows about 65,000 maps."""


class MappedFile(Protocol):
    """A shard file whose chunks are mapped."""

    shard: Shard

    def unmap(self) -> None:
        """Forget all maps."""


class Cache:
    """A cache on a local disk, shared by all threads and processes on the machine."""

    def __init__(self, folder: str | Path | None = None, *, max_bytes: int = DEFAULT_BYTES) -> None:
        """The folder is created, or refused, at the first read."""
        self.folder = CacheFolder(default_folder() if folder is None else Path(folder), max_bytes)
        self.fetched_bytes = 0
        self.requests = 0
        self._in_flight: set[tuple[str, int]] = set()
        """Chunks that this process is fetching: shard hash and chunk number."""
        self._landed = threading.Condition()
        self.max_mapped = MAX_MAPPED_CHUNKS
        self._mapped: WeakSet[MappedFile] = WeakSet()
        self._maps = 0
        """Chunks mapped since the last `refresh` that unmapped all."""
        self._mapping = threading.Lock()
        self._evictions: object = None

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Cache, max_bytes=self.folder.max_bytes), (self.folder.root,)

    def chunks(self, url: str, shard: Shard, first: int, end: int) -> list[Bytes]:
        """Return a shard's verified chunks [first, end), from the disk or else from the store."""
        loaded = dict(self._load(shard, first, end))
        if len(loaded) < end - first:
            loaded = self._load_or_fetch(url, shard, first, end)
        return [loaded[number] for number in range(first, end)]

    def fetch(self, url: str, shard: Shard, first: int, end: int) -> int:
        """Fetch those chunks in [first, end) that are not on the disk; return how many."""
        cached = self.cached_chunks(shard, first, end)
        missing = [number for number in range(first, end) if number not in cached]
        for run in group_runs(missing):
            self._load_or_fetch(url, shard, *run)
        return len(missing)

    def cached_chunks(self, shard: Shard, first: int, end: int) -> set[int]:
        """Return the chunks on the disk in all files that overlap [first, end)."""
        runs = self.folder.runs(shard, first, end)
        return {number for run in runs for number in range(*run)}

    def map(self, file: MappedFile, chunks: ChunkMap, number: int) -> bool:
        """Verify and map the run with chunk `number`; False if it is missing or damaged on disk."""
        shard = file.shard
        runs = self.folder.runs(shard, number, number + 1)
        if not runs:
            return False
        is_valid = partial(self.folder.is_valid, shard, runs[0])
        path = self.folder.path(shard, runs[0])
        try:
            if not chunks.add(runs[0], str(path), is_valid):
                return False
        except OSError as error:
            raise unreadable(error) from None
        with self._mapping:
            self._mapped.add(file)
            self._maps += runs[0].end - runs[0].first
        return True

    def refresh(self) -> None:
        """Unmap all chunks if an eviction happened since the last call, so that the disk frees
        them, or if too many are mapped. Chunks still in use are mapped again. A chunk's bytes never
        change."""
        evictions = self.folder.evictions()
        with self._mapping:
            if evictions == self._evictions and self._maps <= self.max_mapped:
                return
            self._evictions, self._maps = evictions, 0
            files = list(self._mapped)
            self._mapped.clear()
        for file in files:
            file.unmap()

    def _load_or_fetch(self, url: str, shard: Shard, first: int, end: int) -> dict[int, Bytes]:
        """Return the chunks [first, end), fetching what the disk lacks once no other thread or
        process is fetching it."""
        with self._fetch_lock(shard, first, end):
            loaded = dict(self._load(shard, first, end))
            missing = [number for number in range(first, end) if number not in loaded]
            self.folder.remove(shard, missing)  # files on the disk that failed verification
            if missing and shard.stored_name:
                return self._unpack(url, shard)
            for run in group_runs(missing):
                loaded |= self._fetch(url, shard, run)
        return loaded

    def _load(self, shard: Shard, first: int, end: int) -> Iterator[tuple[int, Bytes]]:
        """Yield those chunks in [first, end) that are valid on the disk."""
        for run in self.folder.runs(shard, first, end):
            content = self.folder.read(shard, run)
            if content is None:
                continue
            data, is_valid = content
            if not is_valid:
                path = self.folder.path(shard, run)
                log.warning("%s; fetching it again", damage_message(str(path), shard, run))
                continue
            for number in range(max(first, run.first), min(end, run.end)):
                yield number, data[Run(number, number + 1).byte_range(shard, run.first)]

    def _fetch(self, url: str, shard: Shard, run: Run) -> dict[int, Bytes]:
        where = storage.join(url, shard.name)
        start_byte, end_byte = run.first * CHUNK_BYTES, run.end * CHUNK_BYTES
        if end_byte >= shard.size:
            end_byte = shard.size + 1  # one byte more, to detect a file that has grown

        def check(data: storage.Buffer) -> dict[int, Bytes]:
            self._count(len(data))
            if start_byte + len(data) > shard.size:
                raise IntegrityError(
                    f"{where} has more bytes than its manifest says ({shard.size:,})",
                    hint=RESTORE_HINT,
                )
            return self._store_chunks(where, shard, run, data)

        return view_checked(where, check, start_byte, end_byte)

    def _unpack(self, url: str, shard: Shard) -> dict[int, Bytes]:
        """Fetch, verify and decompress a compressed shard; return all its chunks."""
        assert shard.stored_name is not None
        where = storage.join(url, shard.stored_name)

        def check(packed: bytes) -> bytes:
            self._count(len(packed))
            return check_stored(where, shard, packed)

        packed = read_checked(where, check)
        data = decompress_shard(where, packed, shard.size, shard.details)
        return self._store_chunks(where, shard, Run(0, -(-shard.size // CHUNK_BYTES)), data)

    def _store_chunks(
        self, where: str, shard: Shard, run: Run, data: storage.Buffer
    ) -> dict[int, Bytes]:
        """Split a run's bytes into chunks, verify them and write them to the cache."""
        run_data, chunks = np.frombuffer(data, np.uint8), {}
        try:
            for number in range(*run):
                chunk = run_data[Run(number, number + 1).byte_range(shard, run.first)]
                check_chunk(where, shard, number, chunk)
                chunks[number] = chunk
        finally:
            # The chunks before a damaged one are valid.
            self.folder.keep(shard, Run(run.first, run.first + len(chunks)), run_data)
        return chunks

    def _count(self, size: int) -> None:
        with self._landed:
            self.fetched_bytes += size
            self.requests += 1

    @contextmanager
    def _fetch_lock(self, shard: Shard, first: int, end: int) -> Iterator[None]:
        """Allow a single fetch of a chunk at a time: a set excludes threads, a byte-range lock
        excludes processes. The lock belongs to the open file (OFD), so it ends with its process,
        and two processes whose threads wait for each other's bytes do not deadlock."""
        if shard.stored_name:
            first, end = 0, 1  # one byte locks the whole shard
        names = {(shard.hash, number) for number in range(first, end)}
        lock_file = self.folder.lock_file

        def lock(kind: int) -> None:
            byte = int(shard.hash[:8], 16) + first
            request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, end - first, 0)
            fcntl.fcntl(lock_file, fcntl.F_OFD_SETLKW, request)

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
