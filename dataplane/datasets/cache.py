"""The cache: verified chunks of remote shards on a local disk.

A chunk is hashed before it is written to the cache, and again if its file has changed since, or the
machine has restarted: a power cut can lose data that was not synced, and disks rot. The processes
of a machine know of each other's checks (`CheckedFiles`). Chunks are read where they are mapped
(`ChunkMap`). Adjacent chunks are fetched by one request, and kept in one file. Other threads and
processes that need one of them wait for it.
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
from ..storage.verified import read_checked, view_checked
from .cache_folder import CacheFolder, unreadable
from .chunks import CHUNK_BYTES, RESTORE, ChunkMap, Run, check_chunk, check_stored, damage, spans
from .manifest import Shard

log = get_logger(__name__)

DEFAULT_BYTES = 64 << 30


MAX_MAPPED = 1 << 14
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
        self.max_mapped = MAX_MAPPED
        self._mapped: WeakSet[MappedFile] = WeakSet()
        self._maps = 0
        """Chunks mapped since all were unmapped."""
        self._mapping = threading.Lock()
        self._evictions: object = None

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.folder.root, self.folder.max_bytes))

    def chunks(self, url: str, shard: Shard, first: int, last: int) -> list[Bytes]:
        """Return the verified chunks [first, last) of a shard, from the disk or from its store."""
        loaded = dict(self._load(shard, first, last))
        if len(loaded) < last - first:
            loaded = self._bring(url, shard, first, last)
        return [loaded[number] for number in range(first, last)]

    def fetch(self, url: str, shard: Shard, first: int, last: int) -> int:
        """Fetch the chunks [first, last) of a shard that are not on the disk; return their
        number."""
        held = self.held(shard, first, last)
        absent = [number for number in range(first, last) if number not in held]
        for start, end in spans(absent):
            self._bring(url, shard, start, end)
        return len(absent)

    def held(self, shard: Shard, first: int, last: int) -> set[int]:
        """Return those of the chunks [first, last) that are on the disk, and others of their
        files."""
        runs = self.folder.runs(shard, first, last)
        return {number for run in runs for number in range(*run)}

    def map(self, file: MappedFile, chunks: ChunkMap, number: int) -> bool:
        """Map a chunk of a file, verified, and those of its run; False if it is not on the disk, or
        if the run is damaged there."""
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
            self._maps += runs[0].last - runs[0].first
        return True

    def refresh(self) -> None:
        """Unmap all chunks if some were evicted since the last call, so that the disk frees them,
        or if too many are mapped: those still in use are mapped again. The bytes of a chunk never
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

    def _bring(self, url: str, shard: Shard, first: int, last: int) -> dict[int, Bytes]:
        """Return the chunks [first, last), of which the disk lacked some; another thread or process
        may have fetched them meanwhile."""
        with self._fetching(shard, first, last):
            loaded = dict(self._load(shard, first, last))
            missing = [number for number in range(first, last) if number not in loaded]
            self.folder.remove(shard, missing)  # files on the disk that failed verification
            if missing and shard.stored_name:
                return self._unpack(url, shard)
            for run in spans(missing):
                loaded |= self._fetch(url, shard, run)
        return loaded

    def _load(self, shard: Shard, first: int, last: int) -> Iterator[tuple[int, Bytes]]:
        """Read and verify those of the chunks [first, last) that are on the disk."""
        for run in self.folder.runs(shard, first, last):
            kept = self.folder.read(shard, run)
            if kept is None:
                continue
            data, is_valid = kept
            if not is_valid:
                path = self.folder.path(shard, run)
                log.warning("%s; fetching it again", damage(str(path), shard, run))
                continue
            for number in range(max(first, run.first), min(last, run.last)):
                yield number, data[Run(number, number + 1).place(shard, run.first)]

    def _fetch(self, url: str, shard: Shard, run: Run) -> dict[int, Bytes]:
        where = storage.join(url, shard.name)
        start, end = run.first * CHUNK_BYTES, run.last * CHUNK_BYTES
        if end >= shard.size:
            end = shard.size + 1  # one byte more, to detect a file that has grown

        def check(data: storage.Buffer) -> dict[int, Bytes]:
            self._count(len(data))
            if start + len(data) > shard.size:
                raise IntegrityError(
                    f"{where} has more bytes than its manifest says ({shard.size:,})", hint=RESTORE
                )
            return self._checked(where, shard, run, data)

        return view_checked(where, check, start, end)

    def _unpack(self, url: str, shard: Shard) -> dict[int, Bytes]:
        """Fetch, verify and decompress a whole compressed shard; return its chunks."""
        assert shard.stored_name is not None
        where = storage.join(url, shard.stored_name)

        def check(packed: bytes) -> bytes:
            self._count(len(packed))
            return check_stored(where, shard, packed)

        packed = read_checked(where, check)
        data = unpack(where, packed, shard.size, shard.details)
        return self._checked(where, shard, Run(0, -(-shard.size // CHUNK_BYTES)), data)

    def _checked(
        self, where: str, shard: Shard, run: Run, data: storage.Buffer
    ) -> dict[int, Bytes]:
        """Split the bytes of a run into chunks, verify them and write them to the cache."""
        whole, chunks = np.frombuffer(data, np.uint8), {}
        try:
            for number in range(*run):
                chunk = whole[Run(number, number + 1).place(shard, run.first)]
                check_chunk(where, shard, number, chunk)
                chunks[number] = chunk
        finally:
            # Those before a damaged one are verified.
            self.folder.keep(shard, Run(run.first, run.first + len(chunks)), whole)
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
