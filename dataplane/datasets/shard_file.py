"""The bytes of one shard, each chunk verified against its hash when it is first read.

A local shard is memory-mapped, so reading copies nothing. Its file may change while it is mapped:
readers call `refresh` first, and a changed file is mapped and verified anew. A remote or compressed
shard is read through the cache, which verifies chunks as they arrive.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ...console.errors import IntegrityError, StorageError
from ..arrays import Bytes
from ..storage import storage
from ..storage.mapped import FileState, map_file, read_state
from ..storage.verified import add_hint, view_checked
from .cache import Cache
from .chunks import CHUNK_BYTES, RESTORE, ChunkMap, check_chunk, check_chunk_table, spans
from .manifest import Shard

LOST = (
    "run the build's command again: it writes lost files again; `tokenize verify` finds all of them"
)
NOTHING = np.empty(0, np.uint8)


class ShardFile(Protocol):
    """The verified bytes of a shard."""

    def read(self, start: int, end: int) -> Bytes:
        """Return the bytes [start, end)."""

    @property
    def backing(self) -> Backing:
        """The holder of the bytes, which is refreshed before each group of rows."""

    def current(self) -> tuple[memoryview, bytearray]:
        """Return the bytes of the shard, and 1 for each chunk of them that `read` has to load or to
        verify. Others may be read in place."""


class Backing(Protocol):
    """Where the bytes of shards are."""

    def refresh(self) -> None:
        """Notice that files have changed."""


class LocalShardFile:
    """A memory-mapped shard."""

    def __init__(self, url: str, shard: Shard) -> None:
        self.where = storage.join(url, shard.name)
        self.shard = shard
        check_chunk_table(self.where, shard)
        self._path = str(storage.local_path(self.where))
        self._map()

    @property
    def backing(self) -> LocalShardFile:
        return self

    def current(self) -> tuple[memoryview, bytearray]:
        data, unchecked = self._mapped
        return data.data, unchecked

    def read(self, start: int, end: int) -> Bytes:
        data, unchecked = self._mapped  # another thread may map the file again meanwhile
        first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        while (number := unchecked.find(1, first, last)) >= 0:
            chunk = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            check_chunk(self.where, self.shard, number, chunk)
            unchecked[number] = 0
        return data[start:end]

    def refresh(self) -> None:
        """Map the file again if it has changed since it was verified."""
        if self._state() != self.state:
            self._map()

    def _map(self) -> None:
        self.state = self._state()
        size = self.state[0]
        if size != self.shard.size:
            raise IntegrityError(
                f"{self.where} has {size:,} bytes, and its manifest says {self.shard.size:,}",
                hint=RESTORE,
            )
        try:
            data = map_file(self._path)
        except OSError as error:
            raise self._unreadable(error) from None
        self._mapped = data, bytearray(b"\1" * -(-size // CHUNK_BYTES))

    def _state(self) -> FileState:
        try:
            return read_state(self._path)
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> StorageError:
        reason = error.strerror or error
        return StorageError(f"cannot read the shard {self.where}: {reason}", hint=RESTORE)


class CachedShardFile:
    """A shard read through the cache, whose chunk files are mapped."""

    def __init__(self, url: str, shard: Shard, cache: Cache) -> None:
        check_chunk_table(storage.join(url, shard.name), shard)
        self.url, self.shard, self.cache = url, shard, cache
        self.unmap()

    def read(self, start: int, end: int) -> Bytes:
        chunks = self._chunks  # another thread may unmap them meanwhile
        first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        if chunks.missing.find(1, first, last) >= 0:
            apart = self._load(chunks, first, last)
            if apart:
                return self._joined(chunks, apart, start, end)
        return chunks.data[start:end]

    @property
    def backing(self) -> Cache:
        return self.cache

    def current(self) -> tuple[memoryview, bytearray]:
        chunks = self._chunks
        return chunks.data.data, chunks.missing

    def unmap(self) -> None:
        """Forget all maps. Those with live views go with the last of them."""
        self._chunks = ChunkMap(self.shard)

    def _load(self, chunks: ChunkMap, first: int, last: int) -> dict[int, Bytes]:
        """Map the chunks [first, last), fetching those that the cache lacks. Return those that it
        could not keep."""
        absent = [number for number in range(first, last) if not self._map(chunks, number)]
        apart: dict[int, Bytes] = {}
        for low, high in spans(absent):
            loaded = self.cache.chunks(self.url, self.shard, low, high)
            apart.update(zip(range(low, high), loaded, strict=True))
        return {number: data for number, data in apart.items() if not self._map(chunks, number)}

    def _map(self, chunks: ChunkMap, number: int) -> bool:
        """Map a chunk; False if the cache does not hold it, or holds it damaged."""
        return not chunks.missing[number] or self.cache.map(self, chunks, number)

    def _joined(self, chunks: ChunkMap, apart: dict[int, Bytes], start: int, end: int) -> Bytes:
        parts = []
        for number in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            base = number * CHUNK_BYTES
            part = apart.get(number)
            if part is None:
                part = chunks.data[base : base + CHUNK_BYTES]
            parts.append(part[max(start - base, 0) : end - base])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class UncachedShardFile:
    """A shard read from its store; its chunks are kept in memory, so each is read once."""

    def __init__(self, url: str, shard: Shard) -> None:
        self.where = storage.join(url, shard.name)
        self.shard = shard
        check_chunk_table(self.where, shard)
        self._chunks: dict[int, Bytes] = {}

    def read(self, start: int, end: int) -> bytes:
        first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        for low, high in spans(n for n in range(first, last) if n not in self._chunks):
            self._fetch(low, high)
        parts = [self._chunks[number] for number in range(first, last)]
        base = first * CHUNK_BYTES
        whole: Bytes = np.concatenate([NOTHING, *parts])
        return whole[start - base : end - base].tobytes()

    def _fetch(self, first: int, last: int) -> None:
        def check(data: storage.Buffer) -> None:
            whole = np.frombuffer(data, np.uint8)
            for place, number in enumerate(range(first, last)):
                chunk = whole[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
                check_chunk(self.where, self.shard, number, chunk)
                self._chunks[number] = chunk

        end = min(last * CHUNK_BYTES, self.shard.size)
        with add_hint(LOST):
            view_checked(self.where, check, first * CHUNK_BYTES, end)
