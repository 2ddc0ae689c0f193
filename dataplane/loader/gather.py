"""Where the tokens of rows lie: pieces of shards, each contiguous in its file, in reading order.

    rows → spans of a dataset → parts, each in one shard → pieces, each in one run of the shard

All of it is arithmetic on arrays, done for all rows that were located together: a walk over single
rows costs as much as copying their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Int64
from ..datasets.chunks import CHUNK_BYTES
from ..datasets.dataset import Dataset, Parts
from ..datasets.open_shard import OpenShard
from ..order.stream import Located
from ..shards.format import PADDING
from .stored_rows import StoredRows

NONE = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of the parts of spans in a shard, part by part."""

    parts: Int64
    lows: Int64
    """First token of each piece, in the shard."""
    highs: Int64
    bytes: Int64
    """First byte of each in the shard's file; PADDING if it has none."""
    runs: Int64

    @classmethod
    def of(cls, shard: OpenShard, parts: Parts) -> Pieces:
        layout = shard.layout
        first = layout.run_tokens.searchsorted(parts.lows, "right") - 1
        counts = layout.run_tokens.searchsorted(parts.highs, "left") - first
        owners = np.repeat(np.arange(len(first)), counts)
        runs = ranges(first, counts)
        starts = layout.run_tokens[runs]
        lows = np.maximum(parts.lows[owners], starts)
        highs = np.minimum(parts.highs[owners], layout.run_tokens[runs + 1])
        bytes = layout.run_bytes[runs]
        bytes = np.where(bytes == PADDING, PADDING, bytes + (lows - starts) * shard.dtype.itemsize)
        return cls(owners, lows, highs, bytes, runs)

    def chunks(self, shard: OpenShard) -> tuple[Int64, Int64]:
        """Return the chunks of the shard that hold tokens or their weight codes, and the piece of
        each."""
        stored = np.flatnonzero(self.bytes != PADDING)
        counts = (self.highs - self.lows)[stored]
        found = [_chunks(stored, self.bytes[stored], counts * shard.dtype.itemsize)]
        places = shard.layout.weight_bytes
        if places is not None:
            runs = self.runs[stored]
            inside = self.lows[stored] - shard.layout.run_tokens[runs]
            found.append(_chunks(stored, places[runs] + inside, counts))
        pieces, chunks = (np.concatenate(every) for every in zip(*found, strict=True))
        return chunks, pieces


Copy = tuple[int, int, int, int, int, int, int]
"""A copy of a piece of a row: the place of its shard among those of the rows; its bytes [start,
end) there, of which the start is PADDING if it has none; its chunks [first, last); and its bytes
[low, high) in the rows laid side by side."""


@dataclass(frozen=True, eq=False)
class RowPieces:
    """The pieces of rows that were located together. Places count tokens in the rows laid side by
    side, each with the token after it."""

    length: int
    """Tokens of a row, with the one after it."""
    dtypes: list[np.dtype[Any]]
    kinds: Int64
    """The place of each row's type among `dtypes`."""
    row_bytes: int
    """Bytes of a row of the widest type."""
    shards: list[OpenShard]
    places: Int64
    """The first place of each copy, ascending."""
    copies: list[Copy]
    documents: Int64
    """Places, ascending, after the first of a span at which documents or padding begin."""
    joints: Int64
    """Places at which another span of a row begins."""

    def read(self, first: int, last: int) -> StoredRows:
        """Read the rows [first, last), and verify their bytes."""
        stored = np.empty((last - first, self.row_bytes), np.uint8)
        memory, base = stored.reshape(-1).data, first * self.row_bytes
        low, high = self.places.searchsorted((first * self.length, last * self.length)).tolist()
        copies = self.copies[low:high]
        files = {number: self.shards[number].file for number in {copy[0] for copy in copies}}
        for backing in {file.backing for file in files.values()}:
            backing.refresh()
        current = {number: file.current() for number, file in files.items()}
        for number, start, end, first_chunk, last_chunk, low, high in copies:
            data, unread = current[number]
            if start == PADDING:
                part = self.shards[number].padding.bytes(high - low)
            elif unread.find(1, first_chunk, last_chunk) < 0:
                part = data[start:end]
            else:
                part = files[number].read(start, end).data
            memory[low - base : high - base] = part
        return StoredRows(stored, self.length, self.dtypes, self.kinds[first:last])


def find(located: Located, dataset_of: Callable[[int], Dataset]) -> RowPieces:
    """Find the pieces of rows; opens their datasets and shards."""
    length, reads = located.length + 1, located.reads()
    places = reads.rows * length + reads.places
    sources = located.sources[reads.rows]
    dtypes: list[np.dtype[Any]] = []
    kinds = np.empty(len(located.rows), np.int64)
    shards: list[OpenShard] = []
    found = [(NONE, NONE, NONE, NONE)]
    documents = [NONE]
    for source in np.unique(sources).tolist():
        chosen = np.flatnonzero(sources == source)
        dataset, begin = dataset_of(source), places[chosen]
        dtype = dataset.manifest.token_type
        dtypes += [] if dtype in dtypes else [dtype]
        kinds[reads.rows[chosen]] = dtypes.index(dtype)
        starts, ends = reads.starts[chosen], reads.ends[chosen]
        for parts in dataset.split(starts, ends):
            shard = dataset.open_shard(parts.shard)
            pieces = Pieces.of(shard, parts)
            shifts = begin[parts.spans] + parts.first - starts[parts.spans]
            owners = np.full(len(pieces.lows), len(shards))
            firsts = pieces.lows + shifts[pieces.parts]
            found.append((owners, firsts, pieces.bytes, pieces.highs - pieces.lows))
            shards.append(shard)
            continued = starts[parts.spans] < parts.first
            spans, tokens = _documents(shard, parts.lows + ~continued, parts.highs)
            documents.append(tokens + shifts[spans])
        # The last row of a packed view may read one token more than there are: it is padding.
        beyond = np.flatnonzero(ends > dataset.tokens)
        if len(beyond):
            firsts = begin[beyond] + dataset.tokens - starts[beyond]
            owners, padding = np.full(len(beyond), len(shards)), np.full(len(beyond), PADDING)
            found.append((owners, firsts, padding, ends[beyond] - dataset.tokens))
            shards.append(dataset.open_shard(len(dataset.shards) - 1))
            documents.append(firsts)
    owners, firsts, bytes, counts = (np.concatenate(every) for every in zip(*found, strict=True))
    order = firsts.argsort(kind="stable")
    owners, firsts, bytes, counts = (every[order] for every in (owners, firsts, bytes, counts))
    widths = np.array([dtype.itemsize for dtype in dtypes], np.int64)
    row_bytes = length * int(widths.max(initial=0))
    rows, inside = np.divmod(firsts, length)
    width = widths[kinds[rows]]
    low = rows * row_bytes + inside * width
    sizes = counts * width
    chunks = bytes // CHUNK_BYTES, -(-(bytes + sizes) // CHUNK_BYTES)
    columns = (owners, bytes, bytes + sizes, *chunks, low, low + sizes)
    return RowPieces(
        length=length,
        dtypes=dtypes,
        kinds=kinds,
        row_bytes=row_bytes,
        shards=shards,
        places=firsts,
        copies=list(zip(*(column.tolist() for column in columns), strict=True)),
        documents=np.sort(np.concatenate(documents)),
        joints=places[reads.places > 0],
    )


def ranges(firsts: Int64, counts: Int64) -> Int64:
    """Return the numbers [first, first + count) of each pair, one range after another."""
    before = np.cumsum(counts) - counts
    numbers: Int64 = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    return numbers


def _chunks(pieces: Int64, bytes: Int64, sizes: Int64) -> tuple[Int64, Int64]:
    first = bytes // CHUNK_BYTES
    counts = -(-(bytes + sizes) // CHUNK_BYTES) - first
    return np.repeat(pieces, counts), ranges(first, counts)


def _documents(shard: OpenShard, lows: Int64, highs: Int64) -> tuple[Int64, Int64]:
    """Return the tokens in [low, high) at which documents or padding begin, after the index of
    their range."""
    if shard.layout.padding is not None:
        found = [
            shard.boundaries(*ends) for ends in zip(lows.tolist(), highs.tolist(), strict=True)
        ]
        counts = np.array([len(inside) for inside in found], np.int64)
        return np.repeat(np.arange(len(lows)), counts), np.concatenate(found)
    starts = shard.layout.document_starts[:-1]
    # Equal types: otherwise all starts would be converted first.
    first, last = (starts.searchsorted(ends.astype(starts.dtype)) for ends in (lows, highs))
    owners = np.repeat(np.arange(len(lows)), last - first)
    return owners, starts[ranges(first, last - first)].astype(np.int64)
