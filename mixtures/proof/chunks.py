"""Datasets whose shards are read chunk by chunk: while a proof is made, and while it is checked.

A proof carries the few chunks of a shard that hold its table of documents. Each chunk has a digest
in the dataset's tables, which the plan's hash covers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import numpy as np
import zstandard

from ...console.errors import IntegrityError
from ...dataplane.arrays import Bytes
from ...dataplane.datasets.chunks import CHUNK_BYTES, check_chunk, check_chunk_table
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.datasets.manifest import Shard
from ...dataplane.datasets.shard_file import Backing, ShardFile

ShardChunks = dict[str, dict[int, Bytes]]
"""Chunks by the shard's file name and chunk number."""


class RecordedDataset(Dataset):
    """A dataset that remembers which chunks were read."""

    def __init__(self, url: str, *, generations: int | None = None) -> None:
        super().__init__(url, generations=generations)
        self.chunks: ShardChunks = {}

    def file(self, shard: Shard) -> ShardFile:
        chunks = self.chunks.setdefault(shard.name, {})
        return RecordedShardFile(super().file(shard), shard, chunks)


class RecordedShardFile:
    """A shard file that keeps the chunks it reads."""

    def __init__(self, file: ShardFile, shard: Shard, chunks: dict[int, Bytes]) -> None:
        self._file, self._shard, self._chunks = file, shard, chunks

    def read(self, start: int, end: int) -> Bytes:
        for number in range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            if number not in self._chunks:
                chunk_end = min((number + 1) * CHUNK_BYTES, self._shard.size)
                self._chunks[number] = self._file.read(number * CHUNK_BYTES, chunk_end).copy()
        return self._file.read(start, end)

    @property
    def backing(self) -> Backing:
        return self._file.backing

    def current(self) -> tuple[memoryview, bytearray]:
        return self._file.current()


class ProvenDataset(Dataset):
    """A dataset without shards: its chunks come from a proof, and are checked by their digests."""

    def __init__(self, url: str, chunks: ShardChunks, *, generations: int | None = None) -> None:
        super().__init__(url, generations=generations)
        self._chunks = chunks

    def file(self, shard: Shard) -> ShardFile:
        return ProvenShardFile(shard, self._chunks.get(shard.name, {}))


class ProvenShardFile:
    """The chunks of a shard that a proof carries."""

    def __init__(self, shard: Shard, chunks: Mapping[int, Bytes]) -> None:
        check_chunk_table(shard.name, shard)
        for number, chunk in chunks.items():
            check_chunk(shard.name, shard, number, chunk)
        self._shard, self._chunks = shard, chunks

    def read(self, start: int, end: int) -> Bytes:
        numbers = range(start // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        missing = [number for number in numbers if number not in self._chunks]
        if missing:
            raise IntegrityError(f"the proof lacks chunk {missing[0]} of {self._shard.name}")
        chunks = [np.empty(0, np.uint8), *(self._chunks[number] for number in numbers)]
        base = numbers.start * CHUNK_BYTES
        data: Bytes = np.concatenate(chunks)
        return data[start - base : end - base]

    @property
    def backing(self) -> Backing:
        raise AssertionError("rows are not read from a proof")

    def current(self) -> tuple[memoryview, bytearray]:
        raise AssertionError("rows are not read from a proof")


def encode_chunks(chunks: ShardChunks) -> dict[str, dict[str, str]]:
    """Encode chunks as JSON data."""
    compressor = zstandard.ZstdCompressor()
    return {
        name: {
            str(number): base64.b64encode(compressor.compress(chunk.tobytes())).decode()
            for number, chunk in sorted(shard_chunks.items())
        }
        for name, shard_chunks in chunks.items()
    }


def decode_chunks(data: Mapping[str, Mapping[str, str]]) -> ShardChunks:
    """Decode chunks; raise ValueError if they are damaged."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        return {
            name: {
                int(number): np.frombuffer(
                    decompressor.decompress(base64.b64decode(text), max_output_size=CHUNK_BYTES),
                    np.uint8,
                )
                for number, text in shard_chunks.items()
            }
            for name, shard_chunks in data.items()
        }
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
