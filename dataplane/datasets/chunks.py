"""Chunks of a shard: the unit in which shards are hashed, fetched, cached and mapped."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from ...console.errors import IntegrityError
from ..arrays import Bytes
from ..storage import mapped
from .manifest import Shard

CHUNK_BYTES = 1 << 18
"""Bytes of a chunk. One row does not cost a whole shard, and the ends of a shuffled span of 16 MB
cost at most 2% of it."""

RESTORE = "restore the shard from a copy, or build the dataset again (see `tokenize verify`)"
"""The hint of an error about a damaged shard."""

Check = Callable[[Bytes, os.stat_result], bool]
"""True if bytes of a file with a status are those of a chunk."""


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


def spans(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Group ascending numbers into ranges [first, last) of consecutive ones."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        numbers_in_run = [number for _, number in run]
        yield numbers_in_run[0], numbers_in_run[-1] + 1


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
        raise IntegrityError(damage(where, shard, number), hint=RESTORE)


def damage(where: str, shard: Shard, number: int) -> str:
    """Return the message for a chunk that does not match its digest."""
    first, last = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, shard.size)
    return f"{where} is damaged: bytes {first:,} to {last:,} do not match their hash"


def matches(shard: Shard, number: int, data: Bytes) -> bool:
    """True if the bytes of a chunk match its digest."""
    return hashlib.sha256(data.data).digest() == hash_of(shard, number)


def hash_of(shard: Shard, number: int) -> bytes:
    return shard.chunks[number * 32 : number * 32 + 32]


def check_stored(where: str, shard: Shard, packed: bytes) -> bytes:
    """Return the bytes of a compressed shard's file; raise if they do not match its hash."""
    if hashlib.sha256(packed).hexdigest() != shard.stored_hash:
        raise IntegrityError(
            f"{where} is damaged: its {len(packed):,} bytes differ from those that were written",
            hint=RESTORE,
        )
    return packed


class ChunkMap:
    """Address space of the size of a shard, with the cached files of its chunks mapped into it.

    Reading a row is then a slice: no file is opened and nothing is copied. A mapped file keeps its
    bytes after it is deleted, so eviction never changes the bytes of a view. The disk frees them
    when the last map goes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.missing = bytearray(b"\1" * -(-size // CHUNK_BYTES))
        """1 for each chunk that is not mapped."""
        self._lock = threading.Lock()
        self.data = mapped.address_space(size)

    def add(self, number: int, path: str, is_valid: Check) -> bool:
        """Map a chunk's file; False if it is missing, has another size or is not valid."""
        chunk = self.data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        with self._lock:
            if not self.missing[number]:
                return True
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return False
            try:
                status = os.fstat(descriptor)
                if status.st_size != len(chunk):
                    return False
                mapped.map_over(chunk, descriptor, populate=True)
            except OSError:  # too many maps
                return False
            finally:
                os.close(descriptor)
            if is_valid(chunk, status):
                self.missing[number] = 0
        return not self.missing[number]
