"""Reading many spans of tokens at once: where they lie in the shards, and views of them.

    spans of a dataset → parts, each in one shard → pieces, each contiguous in the shard's file

All of it is arithmetic on arrays: a loop over rows would cost more than copying their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Int64, Tokens
from ..datasets.chunks import CHUNK_BYTES
from ..datasets.dataset import Dataset, Parts
from ..datasets.open_shard import OpenShard, Padding
from ..shards.format import PADDING


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of parts, each in one run of a shard, in the order of the parts."""

    parts: Int64
    lows: Int64
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

    def chunks(self, shard: OpenShard, *, codes: bool = False) -> Int64:
        """Return the chunks of the shard that hold the tokens, and if wanted their weight codes."""
        stored = self.bytes != PADDING
        counts = (self.highs - self.lows)[stored]
        found = [_chunks(self.bytes[stored], counts * shard.dtype.itemsize)]
        places = shard.layout.weight_bytes
        if codes and places is not None:
            runs = self.runs[stored]
            inside = self.lows[stored] - shard.layout.run_tokens[runs]
            found.append(_chunks(places[runs] + inside, counts))
        return np.unique(np.concatenate(found))

    def views(self, shard: OpenShard) -> list[Tokens]:
        """Return a view of the tokens of each piece, verified."""
        width, lengths = shard.dtype.itemsize, self.highs - self.lows
        data = shard.file.mapped(self.chunks(shard))
        shift = self.bytes % width
        if data is None or np.any(shift != shift[0]):
            return [
                shard.padding.tokens(length)
                if byte == PADDING
                else shard.file.read(byte, byte + length * width).view(shard.dtype)
                for byte, length in zip(self.bytes.tolist(), lengths.tolist(), strict=True)
            ]
        begin = int(shift[0])
        tokens = data[begin : begin + (len(data) - begin) // width * width].view(shard.dtype)
        firsts = (self.bytes - begin) // width
        ends = (firsts + lengths).tolist()
        return [tokens[first:end] for first, end in zip(firsts.tolist(), ends, strict=True)]


class Gathered:
    """Views of the tokens of rows, to be copied by one call, and the documents that begin there."""

    def __init__(self) -> None:
        self._views: list[Tokens] = []
        self._places: list[Int64] = []
        self._documents: list[Int64] = []

    def add(self, dataset: Dataset, places: Int64, starts: Int64, ends: Int64) -> None:
        """Add spans of the tokens [start, end) of a dataset, each at its place in the memory that
        they will be copied to.

        The last span of a packed view may read one token more than there are: it is padding."""
        for parts in dataset.split(starts, ends):
            shard = dataset.open_shard(parts.shard)
            shard.file.refresh()
            pieces = Pieces.of(shard, parts)
            shifts = places[parts.spans] + parts.first - starts[parts.spans]
            self._views += pieces.views(shard)
            self._places.append(pieces.lows + shifts[pieces.parts])
            continued = starts[parts.spans] < parts.first
            owners, documents = _documents(shard, parts.lows + ~continued, parts.highs)
            self._documents.append(documents + shifts[owners])
        for span in np.flatnonzero(ends > dataset.tokens).tolist():
            place = places[span] + dataset.tokens - starts[span]
            self._views.append(Padding(dataset.manifest).tokens(int(ends[span]) - dataset.tokens))
            self._places.append(np.array([place]))
            self._documents.append(np.array([place]))

    def views(self) -> tuple[Int64, list[Tokens]]:
        """Return the places of the views, ascending, and the views."""
        places = np.concatenate([*self._places, np.empty(0, np.int64)])
        order = places.argsort(kind="stable")
        return places[order], [self._views[number] for number in order.tolist()]

    def documents(self) -> Int64:
        """Return the places after the first of each span at which documents or padding begin."""
        return np.sort(np.concatenate([*self._documents, np.empty(0, np.int64)]))


def ranges(firsts: Int64, counts: Int64) -> Int64:
    """Return the numbers [first, first + count) of each pair, one range after another."""
    before = np.cumsum(counts) - counts
    numbers: Int64 = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    return numbers


def _chunks(bytes: Int64, sizes: Int64) -> Int64:
    first = bytes // CHUNK_BYTES
    return ranges(first, -(-(bytes + sizes) // CHUNK_BYTES) - first)


def _documents(shard: OpenShard, lows: Int64, highs: Int64) -> tuple[Int64, Int64]:
    """Return the tokens in [low, high) at which documents or padding begin, and the index of each
    range."""
    if shard.layout.padding is not None:
        found = [
            shard.boundaries(*ends) for ends in zip(lows.tolist(), highs.tolist(), strict=True)
        ]
        counts = np.array([len(inside) for inside in found], np.int64)
        return np.repeat(np.arange(len(lows)), counts), np.concatenate(found)
    starts = shard.layout.document_starts[:-1]
    first = starts.searchsorted(lows)
    counts = starts.searchsorted(highs) - first
    return np.repeat(np.arange(len(lows)), counts), starts[ranges(first, counts)]
