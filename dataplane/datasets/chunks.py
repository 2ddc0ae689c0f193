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
"""Bytes of a chunk. One row does not cost a whole shard, and the ends of a shuffled span of 16 MB
cost at most 2% of it."""

MOST_CHUNKS = 16
"""Most chunks of a request and of a file of the cache: 4 MiB, which stores serve nearly as fast as
whole objects. (File systems create many small files slowly, above all where many were deleted.)"""

RESTORE = "restore the shard from a copy, or build the dataset again (see `tokenize verify`)"
"""The hint of an error about a damaged shard."""

Check = Callable[[Bytes, os.stat_result], bool]
"""True if bytes of a file with a status are those of a run."""


class Run(NamedTuple):
    """The adjacent chunks [first, last) of a shard."""

    first: int
    last: int

    def place(self, shard: Shard, base: int = 0) -> slice:
        """Return the bytes of the run in its shard, or in bytes that begin with chunk `base`."""
        start = base * CHUNK_BYTES
        end = min(self.last * CHUNK_BYTES, shard.size)
        return slice(self.first * CHUNK_BYTES - start, end - start)


class ChunkHasher:
    """Hashes a file while it is written: the digest of each chunk, and their root hash."""

    def __init__(self) -> None:
        self.size = 0
        self._digests: list[bytes] = []
        self._current = hashlib.sha256()

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            room = CHUNK_BYTES - self.size % CHUNK_BYTES
            part, view = view[:room], view[room:]
            self._current.update(part)
            self.size += len(part)
            if self.size % CHUNK_BYTES == 0:
                self._close()

    def finish(self) -> tuple[bytes, str]:
        """Return the chunks' digests, concatenated, and the file's hash."""
        partial = [self._current.digest()] if self.size % CHUNK_BYTES else []
        chunks = b"".join([*self._digests, *partial])
        return chunks, root_hash(self.size, chunks)

    def _close(self) -> None:
        self._digests.append(self._current.digest())
        self._current = hashlib.sha256()


def root_hash(size: int, chunks: bytes) -> str:
    return hashlib.sha256(size.to_bytes(8, "little") + chunks).hexdigest()


def spans(numbers: Iterable[int]) -> Iterator[Run]:
    """Group ascending numbers into runs of consecutive ones."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        numbers_in_run = [number for _, number in run]
        yield Run(numbers_in_run[0], numbers_in_run[-1] + 1)


def chunks_in(size: int) -> int:
    """Return the number of chunks of a file of about `size` bytes."""
    return max(1, min(MOST_CHUNKS, size // CHUNK_BYTES))


def check_chunk_table(where: str, shard: Shard) -> None:
    """Raise if the chunk digests of a shard do not match its size and its hash."""
    hashed = len(shard.chunks) // 32
    if hashed != -(-shard.size // CHUNK_BYTES):
        raise IntegrityError(
            f"{where} has {hashed} chunk hashes; {shard.size:,} bytes need one per "
            f"{CHUNK_BYTES:,} bytes",
            hint="build or index the dataset again",
        )
    if root_hash(shard.size, shard.chunks) != shard.hash:
        raise IntegrityError(f"the chunk hashes of {where} do not match its hash", hint=RESTORE)


def check_chunk(where: str, shard: Shard, number: int, data: Bytes) -> None:
    """Raise if the bytes of a chunk do not match its digest."""
    if not matches(shard, number, data):
        raise IntegrityError(damage(where, shard, Run(number, number + 1)), hint=RESTORE)


def damage(where: str, shard: Shard, run: Run) -> str:
    """Return the message for chunks that do not match their digests."""
    place = run.place(shard)
    return f"{where} is damaged: bytes {place.start:,} to {place.stop:,} do not match their hash"


def matches(shard: Shard, number: int, data: Bytes) -> bool:
    """True if the bytes of a chunk match its digest."""
    return hashlib.sha256(data.data).digest() == hash_of(shard, number)


def hash_of(shard: Shard, number: int, last: int | None = None) -> bytes:
    """Return the digest of a chunk, or the digests of the chunks [number, last)."""
    return shard.chunks[number * 32 : (last or number + 1) * 32]


def check_stored(where: str, shard: Shard, packed: bytes) -> bytes:
    """Return the bytes of a compressed shard's file; raise if they do not match its hash."""
    if hashlib.sha256(packed).hexdigest() != shard.stored_hash:
        raise IntegrityError(
            f"{where} is damaged: its {len(packed):,} bytes differ from those that were written",
            hint=RESTORE,
        )
    return packed


class ChunkMap:
    """Address space of the size of a shard, with the cached files of its runs mapped into it.

    Reading a row is then a slice: no file is opened and nothing is copied. A mapped file keeps its
    bytes after it is deleted, so eviction never changes the bytes of a view. The disk frees them
    when the last map goes.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.missing = bytearray(b"\1" * -(-shard.size // CHUNK_BYTES))
        """1 for each chunk that is not mapped."""
        self._lock = threading.Lock()
        self.data = mapped.reserve_memory(shard.size)

    def add(self, run: Run, path: str, is_valid: Check) -> bool:
        """Map a run's file; False if it is missing, has another size or is not valid, or if some of
        its chunks are mapped from other files, which views may be reading."""
        data = self.data[run.place(self.shard)]
        with self._lock:
            unmapped = self.missing.count(1, *run)
            if unmapped < run.last - run.first:
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
            self.missing[slice(*run)] = bytes(run.last - run.first)
        return True
