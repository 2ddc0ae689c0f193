"""Verified shard bytes: a chunk is checked against its digest when it is first read.

A local shard is memory-mapped, so reading copies nothing. The file may change while it is mapped:
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
from .chunks import CHUNK_BYTES, RESTORE_HINT, ChunkMap, check_chunk, check_chunk_table, group_runs
from .manifest import Shard

REBUILD_HINT = (
    "run the build's command again: it writes lost files again; `tokenize verify` finds all of them"
)
NO_BYTES = np.empty(0, np.uint8)


class ShardFile(Protocol):
    """A shard's verified bytes."""

    def read(self, start: int, end: int) -> Bytes:
        """Return the bytes [start, end)."""

    @property
    def backing(self) -> Backing:
        """Where the bytes are; refreshed before each group of rows."""

    def current(self) -> tuple[memoryview, bytearray]:
        """Return the shard's bytes, and a flag per chunk: 1 if `read` has to load or verify the
        chunk, 0 if it may be read in place."""


class Backing(Protocol):
    """Where shard bytes are: a local file, or the cache."""

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
        first_chunk, end_chunk = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        while (number := unchecked.find(1, first_chunk, end_chunk)) >= 0:
            chunk = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            check_chunk(self.where, self.shard, number, chunk)
            unchecked[number] = 0
        return data[start:end]

    def refresh(self) -> None:
        """Map the file again if it has changed since the last map."""
        if self._state() != self.state:
            self._map()

    def _map(self) -> None:
        self.state = self._state()
        size = self.state[0]
        if size != self.shard.size:
            raise IntegrityError(
                f"{self.where} has {size:,} bytes, and its manifest says {self.shard.size:,}",
                hint=RESTORE_HINT,
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
        return StorageError(f"cannot read the shard {self.where}: {reason}", hint=RESTORE_HINT)


class CachedShardFile:
    """A shard read through the cache, whose chunk files are mapped."""

    def __init__(self, url: str, shard: Shard, cache: Cache) -> None:
        check_chunk_table(storage.join(url, shard.name), shard)
        self.url, self.shard, self.cache = url, shard, cache
        self.unmap()

    def read(self, start: int, end: int) -> Bytes:
        chunks = self._chunks  # another thread may unmap them meanwhile
        first_chunk, end_chunk = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        if chunks.missing.find(1, first_chunk, end_chunk) >= 0:
            unmapped = self._load(chunks, first_chunk, end_chunk)
            if unmapped:
                return self._join(chunks, unmapped, start, end)
        return chunks.data[start:end]

    @property
    def backing(self) -> Cache:
        return self.cache

    def current(self) -> tuple[memoryview, bytearray]:
        chunks = self._chunks
        return chunks.data.data, chunks.missing

    def unmap(self) -> None:
        """Forget all maps. A map with live views goes with the last view."""
        self._chunks = ChunkMap(self.shard)

    def _load(self, chunks: ChunkMap, first: int, end: int) -> dict[int, Bytes]:
        """Map the chunks [first, end), fetching those missing in the cache. Return those that the
        cache could not store."""
        missing = [number for number in range(first, end) if not self._map(chunks, number)]
        unmapped: dict[int, Bytes] = {}
        for run in group_runs(missing):
            loaded = self.cache.chunks(self.url, self.shard, *run)
            unmapped.update(zip(range(*run), loaded, strict=True))
        return {number: data for number, data in unmapped.items() if not self._map(chunks, number)}

    def _map(self, chunks: ChunkMap, number: int) -> bool:
        """Map a chunk; False if it is missing or damaged in the cache."""
        return not chunks.missing[number] or self.cache.map(self, chunks, number)

    def _join(self, chunks: ChunkMap, unmapped: dict[int, Bytes], start: int, end: int) -> Bytes:
        """Return the bytes [start, end), copied if they lie in several chunks."""
        pieces = []
        for number in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            base = number * CHUNK_BYTES
            chunk = unmapped.get(number)
            if chunk is None:
                chunk = chunks.data[base : base + CHUNK_BYTES]
            pieces.append(chunk[max(start - base, 0) : end - base])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


class UncachedShardFile:
    """A shard read from its store. Chunks are kept in memory, so none is read twice."""

    def __init__(self, url: str, shard: Shard) -> None:
        self.where = storage.join(url, shard.name)
        self.shard = shard
        check_chunk_table(self.where, shard)
        self._chunks: dict[int, Bytes] = {}

    def read(self, start: int, end: int) -> bytes:
        first_chunk, end_chunk = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        numbers = range(first_chunk, end_chunk)
        for run in group_runs(number for number in numbers if number not in self._chunks):
            self._fetch(*run)
        chunks = [self._chunks[number] for number in numbers]
        base = first_chunk * CHUNK_BYTES
        data: Bytes = np.concatenate([NO_BYTES, *chunks])
        return data[start - base : end - base].tobytes()

    def _fetch(self, first: int, end: int) -> None:
        def check(data: storage.Buffer) -> None:
            content = np.frombuffer(data, np.uint8)
            for index, number in enumerate(range(first, end)):
                chunk = content[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
                check_chunk(self.where, self.shard, number, chunk)
                self._chunks[number] = chunk

        end_byte = min(end * CHUNK_BYTES, self.shard.size)
        with add_hint(REBUILD_HINT):
            view_checked(self.where, check, first * CHUNK_BYTES, end_byte)
