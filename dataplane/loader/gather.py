"""Where the tokens of rows lie: pieces of shards, each contiguous in its file, in reading order.

    rows → spans of a dataset → parts, each in one shard → pieces, each in one run of the shard

All of it is arithmetic on arrays, done for all rows that were located together: a walk over single
rows costs as much as copying their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arrays import Int64, Tokens
from ..datasets.chunks import CHUNK_BYTES
from ..datasets.dataset import Dataset, Parts
from ..datasets.open_shard import OpenShard
from ..order.stream import Located
from ..shards.format import PADDING

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


@dataclass(frozen=True, eq=False)
class RowPieces:
    """The pieces of rows. Places count tokens in the rows laid side by side, each with the token
    after it."""

    places: Int64
    """Ascending."""
    shards: list[OpenShard]
    bytes: list[int]
    """First byte of each piece in its shard; PADDING if it has none."""
    tokens: list[int]
    """Tokens of each piece."""
    documents: Int64
    """Places, ascending, after the first of a span at which documents or padding begin."""
    joints: Int64
    """Places at which another span of a row begins."""

    def views(self, first: int, last: int) -> list[Tokens]:
        """Return verified views of the pieces [first, last)."""
        views, current = [], set()
        chosen = slice(first, last)
        for shard, byte, tokens in zip(
            self.shards[chosen], self.bytes[chosen], self.tokens[chosen], strict=True
        ):
            if shard not in current:
                shard.file.refresh()
                current.add(shard)
            if byte == PADDING:
                views.append(shard.padding.tokens(tokens))
            else:
                end = byte + tokens * shard.dtype.itemsize
                views.append(shard.file.read(byte, end).view(shard.dtype))
        return views


def find(located: Located, dataset_of: Callable[[int], Dataset]) -> RowPieces:
    """Find the pieces of rows; opens their datasets and shards."""
    reads = located.reads()
    places = reads.rows * (located.length + 1) + reads.places
    sources = located.sources[reads.rows]
    shards: list[OpenShard] = []
    found = [(NONE, NONE, NONE)]
    documents = [NONE]
    for source in np.unique(sources).tolist():
        chosen = np.flatnonzero(sources == source)
        dataset, begin = dataset_of(source), places[chosen]
        starts, ends = reads.starts[chosen], reads.ends[chosen]
        for parts in dataset.split(starts, ends):
            shard = dataset.open_shard(parts.shard)
            pieces = Pieces.of(shard, parts)
            shifts = begin[parts.spans] + parts.first - starts[parts.spans]
            found.append(
                (pieces.lows + shifts[pieces.parts], pieces.bytes, pieces.highs - pieces.lows)
            )
            shards += [shard] * len(pieces.lows)
            continued = starts[parts.spans] < parts.first
            owners, tokens = _documents(shard, parts.lows + ~continued, parts.highs)
            documents.append(tokens + shifts[owners])
        # The last row of a packed view may read one token more than there are: it is padding.
        beyond = np.flatnonzero(ends > dataset.tokens)
        if len(beyond):
            after = begin[beyond] + dataset.tokens - starts[beyond]
            found.append((after, np.full(len(beyond), PADDING), ends[beyond] - dataset.tokens))
            shards += [dataset.open_shard(len(dataset.shards) - 1)] * len(beyond)
            documents.append(after)
    at, bytes, counts = (np.concatenate(every) for every in zip(*found, strict=True))
    order = at.argsort(kind="stable")
    return RowPieces(
        places=at[order],
        shards=[shards[number] for number in order.tolist()],
        bytes=bytes[order].tolist(),
        tokens=counts[order].tolist(),
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
