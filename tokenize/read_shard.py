"""Read a whole shard, and count its documents and tokens; for `verify` and `index`."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..console.errors import InputError, IntegrityError, StorageError
from ..dataplane.arrays import Int64
from ..dataplane.datasets.chunks import ChunkHasher, check_stored
from ..dataplane.datasets.manifest import Shard
from ..dataplane.shards import shard_format
from ..dataplane.shards.compression import unpack
from ..dataplane.shards.format import ShardLayout
from ..dataplane.storage import storage
from ..dataplane.storage.verified import read_checked

Bytes = bytes | mmap.mmap

ID_LIMIT = 1 << 32
"""No vocabulary is so large. Larger values are not ids, or were written with another type; from
2^63 on they would be negative in int64."""
LARGEST_REMOTE = 1 << 30
"""Bytes of the largest remote shard that is read into memory."""


@dataclass(frozen=True)
class ShardContents:
    """Counts and ids of a shard."""

    documents: int
    tokens: int
    largest_id: int
    """-1 in a shard without tokens."""
    ends: frozenset[int]
    """Last ids of its documents; two different ones at most."""


def read_shard(
    url: str, shard: Shard, check: Callable[[Bytes], Bytes] = lambda data: data
) -> Bytes:
    """Return the bytes of a shard, decompressed and checked. Local files are memory-mapped: shards
    of external datasets may be larger than memory. `check` returns them or raises."""
    if shard.stored_name is None:
        where = storage.join(url, shard.name)
        size = storage.size(where)
        if storage.is_local(where) and size:
            with storage.local_path(where).open("rb") as file:
                return check(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if size > LARGEST_REMOTE:
            raise StorageError(
                f"{where} has {size:,} bytes: too large to read at once from a remote store",
                hint="run the command where the file is on a local disk",
            )
        return read_checked(where, check)
    where = storage.join(url, shard.stored_name)
    packed = (
        storage.read(where)
        if shard.stored_hash is None
        else read_checked(where, partial(check_stored, where, shard))
    )
    return check(unpack(where, packed, shard.size, shard.details))


def hash_of(data: Bytes) -> tuple[bytes, str]:
    """Return the digests of a file's chunks, and the hash of the file."""
    hasher = ChunkHasher()
    hasher.update(memoryview(data))
    return hasher.finish()


def read_contents(
    data: Bytes, format: str, dtype: str, details: dict[str, object]
) -> ShardContents:
    """Read every token of a shard."""
    view = memoryview(data)

    def read(start: int, end: int) -> bytes:
        return bytes(view[start:end])

    layout = shard_format(format).layout(read, len(data), dtype=dtype, details=details)
    largest = -1
    for run in _runs(layout, data, dtype):
        if len(run):
            largest = max(largest, int(run.max()))
            if (least := int(run.min())) < 0:
                raise InputError(f"it has {least}, which is not an id")
            if largest >= ID_LIMIT:
                raise InputError(f"it has {largest}: ids are less than {ID_LIMIT:,}")
    ends = _last_tokens(layout, data, dtype)
    return ShardContents(
        documents=len(layout.document_starts) - 1,
        tokens=int(layout.document_starts[-1]),
        largest_id=largest,
        ends=frozenset(np.unique(ends)[:2].tolist()),
    )


def _runs(layout: ShardLayout, data: Bytes, dtype: str) -> Iterator[Any]:
    width = np.dtype(dtype).itemsize
    counts = np.diff(layout.run_tokens).tolist()
    for count, start in zip(counts, layout.run_bytes.tolist(), strict=False):
        if start + count * width > len(data):
            raise IntegrityError("its tokens extend past the end of the file")
        yield np.frombuffer(data, dtype, count, start)


def _last_tokens(layout: ShardLayout, data: Bytes, dtype: str) -> Int64:
    """Return the last id of each document that is not empty."""
    width = np.dtype(dtype).itemsize
    starts = layout.document_starts
    last = starts[1:][np.diff(starts) > 0] - 1
    run = np.searchsorted(layout.run_tokens, last, side="right") - 1
    offsets = layout.run_bytes[run] + (last - layout.run_tokens[run]) * width
    octets = np.frombuffer(data, np.uint8)
    picked = octets[offsets[:, None] + np.arange(width)]
    return np.ascontiguousarray(picked).view(dtype).reshape(-1).astype(np.int64)
