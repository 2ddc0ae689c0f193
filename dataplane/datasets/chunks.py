"""Chunks of a shard: the unit in which shards are hashed, fetched, cached and mapped."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from ...console.errors import IntegrityError
from ..arrays import Bytes
from ..storage import mapped
from .manifest import Shard

CHUNK_BYTES = 1 << 18
"""Chunk size. One row does not cost a whole shard, and the ends of a shuffled 16 MB span cost at
most 2% of it."""

MAX_RUN_CHUNKS = 16
"""Chunks per request and per cache file: 4 MiB, which stores serve nearly as fast as whole objects.
(File systems create many small files slowly, above all where many were deleted.)"""

RESTORE_HINT = "restore the shard from a copy, or build the dataset again (see `tokenize verify`)"
"""Hint for a damaged shard."""

RunCheck = Callable[[Bytes, os.stat_result], bool]
"""Returns True if a run's file, with this content and status, is valid."""


class Run(NamedTuple):
    """Adjacent chunks [first, end) in a shard."""

    first: int
    end: int

    def byte_range(self, shard: Shard, base_chunk: int = 0) -> slice:
        """Return the run's bytes, relative to the first byte of `base_chunk`."""
        start = base_chunk * CHUNK_BYTES
        end = min(self.end * CHUNK_BYTES, shard.size)
        return slice(self.first * CHUNK_BYTES - start, end - start)


class ChunkHasher:
    """Hashes a file while it is written: a digest per chunk, and the root hash."""

    def __init__(self) -> None:
        self.size = 0
        self._digests: list[bytes] = []
        self._current = hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            missing = CHUNK_BYTES - self.size % CHUNK_BYTES
            piece, view = view[:missing], view[missing:]
            self._current.update(piece)
            self.size += len(piece)
            if self.size % CHUNK_BYTES == 0:
                self._digests.append(self._current.digest())
                self._current = hashlib.sha256()

    def finish(self) -> tuple[bytes, str]:
        """Return the concatenated chunk digests, and the root hash."""
        partial = [self._current.digest()] if self.size % CHUNK_BYTES else []
        digests = b"".join([*self._digests, *partial])
        return digests, root_hash(self.size, digests)


def root_hash(size: int, digests: bytes) -> str:
    return hashlib.sha256(size.to_bytes(8, "little") + digests).hexdigest()


def group_runs(numbers: Iterable[int]) -> Iterator[Run]:
    """Group ascending chunk numbers into runs."""
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        yield Run(run[0], run[-1] + 1)


def chunks_per_file(file_bytes: int) -> int:
    """Return how many chunks a cache file may hold, at about `file_bytes`."""
    return max(1, min(MAX_RUN_CHUNKS, file_bytes // CHUNK_BYTES))


def check_chunk_table(where: str, shard: Shard) -> None:
    """Raise if a shard's chunk digests do not match its size and hash."""
    num_digests = len(shard.chunks) // 32
    if num_digests != -(-shard.size // CHUNK_BYTES):
        raise IntegrityError(
            f"{where} has {num_digests} chunk hashes; {shard.size:,} bytes need one per "
            f"{CHUNK_BYTES:,} bytes",
            hint="build or index the dataset again",
        )
    if root_hash(shard.size, shard.chunks) != shard.hash:
        raise IntegrityError(
            f"the chunk hashes of {where} do not match its hash", hint=RESTORE_HINT
        )


def check_chunk(where: str, shard: Shard, number: int, data: Bytes) -> None:
    """Raise if a chunk does not match its digest."""
    if not matches_digest(shard, number, data):
        raise IntegrityError(
            damage_message(where, shard, Run(number, number + 1)), hint=RESTORE_HINT
        )


def damage_message(where: str, shard: Shard, run: Run) -> str:
    """Return the message for a run whose chunks do not match their digests."""
    span = run.byte_range(shard)
    return f"{where} is damaged: bytes {span.start:,} to {span.stop:,} do not match their hash"


def matches_digest(shard: Shard, number: int, data: Bytes) -> bool:
    """Return True if a chunk matches its digest."""
    return hashlib.sha256(data.data).digest() == chunk_digests(shard, number, number + 1)


def chunk_digests(shard: Shard, first: int, end: int) -> bytes:
    """Return the concatenated digests of the chunks [first, end)."""
    return shard.chunks[first * 32 : end * 32]


def check_stored(where: str, shard: Shard, packed: bytes) -> bytes:
    """Return a compressed shard's file content; raise if it does not match its hash."""
    if hashlib.sha256(packed).hexdigest() != shard.stored_hash:
        raise IntegrityError(
            f"{where} is damaged: its {len(packed):,} bytes differ from those that were written",
            hint=RESTORE_HINT,
        )
    return packed


class ChunkMap:
    """Address space for a shard, into which the cached files of its runs are mapped.

    Reading a row is then a slice: no file is opened and nothing is copied. A mapped file keeps its
    bytes after deletion, so eviction never changes a view. The disk frees them when the last map
    goes.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.missing = bytearray(b"\1" * -(-shard.size // CHUNK_BYTES))
        """Per chunk: 1 if it is not mapped."""
        self._lock = threading.Lock()
        self.data = mapped.reserve_memory(shard.size)

    def add(self, run: Run, path: str, is_valid: RunCheck) -> bool:
        """Map a run's file. Return False if it is missing or invalid, has the wrong size, or if
        chunks are already mapped from other files, which views may be reading."""
        data = self.data[run.byte_range(self.shard)]
        with self._lock:
            unmapped = self.missing.count(1, *run)
            if unmapped < run.end - run.first:
                return not unmapped
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return False
            try:
                status = os.fstat(descriptor)
                if status.st_size != len(data):
                    return False
                mapped.map_over(data, descriptor, populate=True)
            except OSError:  # too many maps
                return False
            finally:
                os.close(descriptor)
            if not is_valid(data, status):
                return False
            self.missing[slice(*run)] = bytes(run.end - run.first)
        return True
