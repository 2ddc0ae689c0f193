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
from ..dataplane.shards.compression import decompress_shard
from ..dataplane.shards.format import ShardLayout
from ..dataplane.storage import storage
from ..dataplane.storage.verified import read_checked

Bytes = bytes | mmap.mmap

ID_LIMIT = 1 << 32
"""Above any vocabulary. Larger values are not ids, or were written with another type; from 2^63 on
they would be negative in int64."""
MAX_REMOTE_BYTES = 1 << 30
"""Upper bound on a remote shard that is read into memory."""


@dataclass(frozen=True)
class ShardContents:
    """A shard's counts and ids."""

    documents: int
    tokens: int
    largest_id: int
    """-1 in a shard without tokens."""
    ends: frozenset[int]
    """Documents' last ids; at most two different ones."""


def read_shard(
    url: str, shard: Shard, check: Callable[[Bytes], Bytes] = lambda data: data
) -> Bytes:
    """Read a shard's bytes, decompressed and checked: `check` returns them or raises. Local files
    are memory-mapped, because external datasets' shards may be larger than memory."""
    if shard.stored_name is None:
        url = storage.join(url, shard.name)
        size = storage.size(url)
        if storage.is_local(url) and size:
            with storage.local_path(url).open("rb") as file:
                return check(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if size > MAX_REMOTE_BYTES:
            raise StorageError(
                f"{url} has {size:,} bytes: too large to read at once from a remote store",
                hint="run the command where the file is on a local disk",
            )
        return read_checked(url, check)
    url = storage.join(url, shard.stored_name)
    stored_bytes = (
        storage.read(url)
        if shard.stored_hash is None
        else read_checked(url, partial(check_stored, url, shard))
    )
    return check(decompress_shard(url, stored_bytes, shard.size, shard.details))


def hash_chunks(data: Bytes) -> tuple[bytes, str]:
    """Return a file's chunk digests and hash."""
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
    max_id = -1
    for run in _runs(layout, data, dtype):
        if len(run):
            max_id = max(max_id, int(run.max()))
            if (min_id := int(run.min())) < 0:
                raise InputError(f"it has {min_id}, which is not an id")
            if max_id >= ID_LIMIT:
                raise InputError(f"it has {max_id}: ids are less than {ID_LIMIT:,}")
    ends = _last_tokens(layout, data, dtype)
    return ShardContents(
        documents=len(layout.document_starts) - 1,
        tokens=int(layout.document_starts[-1]),
        largest_id=max_id,
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
    """Return the last id in every non-empty document."""
    width = np.dtype(dtype).itemsize
    starts = layout.document_starts
    last_positions = starts[1:][np.diff(starts) > 0] - 1
    run_indices = np.searchsorted(layout.run_tokens, last_positions, side="right") - 1
    offsets = (
        layout.run_bytes[run_indices] + (last_positions - layout.run_tokens[run_indices]) * width
    )
    octets = np.frombuffer(data, np.uint8)
    id_bytes = octets[offsets[:, None] + np.arange(width)]
    return np.ascontiguousarray(id_bytes).view(dtype).reshape(-1).astype(np.int64)
