"""Chunks of a shard: the unit in which shards are hashed, fetched and cached."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby

from ...console.errors import IntegrityError
from ..arrays import Bytes
from .manifest import Shard

CHUNK_BYTES = 1 << 18
"""Bytes of a chunk. One row does not cost a whole shard, and the ends of a shuffled span of 16 MB
cost at most 2% of it."""

RESTORE = "restore the shard from a copy, or build the dataset again (see `tokenize verify`)"
"""The hint of an error about a damaged shard."""


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
    if hashlib.sha256(data.data).digest() != shard.chunks[number * 32 : number * 32 + 32]:
        first, last = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, shard.size)
        raise IntegrityError(
            f"{where} is damaged: bytes {first:,} to {last:,} do not match their hash",
            hint=RESTORE,
        )


def check_stored(where: str, shard: Shard, packed: bytes) -> bytes:
    """Return the bytes of a compressed shard's file; raise if they do not match its hash."""
    if hashlib.sha256(packed).hexdigest() != shard.stored_hash:
        raise IntegrityError(
            f"{where} is damaged: its {len(packed):,} bytes differ from those that were written",
            hint=RESTORE,
        )
    return packed
