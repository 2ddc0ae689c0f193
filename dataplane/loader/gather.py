"""Where the tokens of rows lie: pieces of shards, each contiguous in its file, in reading order.

    rows → spans of a dataset → parts, each in one shard → pieces, each in one run of the shard

All of it is arithmetic on arrays, done for all rows that were located together: a walk over single
rows costs as much as copying their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..arrays import Int64
from ..datasets.chunks import CHUNK_BYTES
from ..datasets.dataset import Dataset, Parts
from ..datasets.open_shard import OpenShard, Padding
from ..datasets.shard_file import ShardFile
from ..order.stream import Located, Reads
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

    def code_bytes(self, shard: OpenShard) -> Int64:
        """Return the first byte of the weight codes of each piece; PADDING if it has none."""
        places = shard.layout.weight_bytes
        if places is None:
            return np.full(len(self.runs), PADDING)
        inside = self.lows - shard.layout.run_tokens[self.runs]
        return np.where(self.bytes == PADDING, PADDING, places[self.runs] + inside)


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
    shards: list[tuple[Dataset, int]]
    """The shards that pieces lie in: a dataset, and a number in it."""
    files: dict[int, ShardFile]
    """The files of shards, by their places. Opening one takes as long as reading many rows; the
    rest of an open shard (where its documents are) takes memory, and was needed to find rows."""
    places: Int64
    """The first place of each copy, ascending."""
    copies: Int64
    """[copies, 7] A copy of a piece of a row: the place of its shard among those of the rows; its
    bytes [start, end) there, of which the start is PADDING if it has none; its chunks [first,
    last); and its bytes [low, high) in the rows laid side by side."""
    codes: Int64
    """[pieces with weight codes, 4] The first place of a piece, the place of its shard, and the
    chunks [first, last) of its codes."""
    documents: Int64
    """Places, ascending, after the first of a span at which documents or padding begin."""
    joints: Int64
    """Places at which another span of a row begins."""

    def read(self, first: int, last: int) -> StoredRows:
        """Read the rows [first, last), and verify their bytes."""
        stored = np.empty((last - first, self.row_bytes), np.uint8)
        memory, base = stored.reshape(-1).data, first * self.row_bytes
        copies = self.copies[self._range(self.places, first, last)].tolist()
        files = {place: self._file(place) for place in {copy[0] for copy in copies}}
        for backing in {file.backing for file in files.values()}:
            backing.refresh()
        current = {place: file.current() for place, file in files.items()}
        for place, start, end, first_chunk, last_chunk, low, high in copies:
            data, unread = current[place]
            if start == PADDING:
                part = Padding(self.shards[place][0].manifest).bytes(high - low)
            elif unread.find(1, first_chunk, last_chunk) < 0:
                part = data[start:end]
            else:
                part = files[place].read(start, end).data
            memory[low - base : high - base] = part
        return StoredRows(stored, self.length, self.dtypes, self.kinds[first:last])

    def chunks(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the chunks that the rows [first, last) read: the place of the shard of each, and
        its number there."""
        places, chunks = self._chunks
        distinct = np.unique(chunks[self._range(places, first, last)])
        shards, numbers = distinct >> 32, distinct & 0xFFFF_FFFF
        return list(zip(shards.tolist(), numbers.tolist(), strict=True))

    @cached_property
    def _chunks(self) -> tuple[Int64, Int64]:
        """The chunks that pieces read, after their first places, ascending. A chunk is the place of
        its shard, times 2³², plus its number."""
        shards, starts, _, firsts, lasts, *_ = self.copies.T
        tokens = np.stack([self.places, shards, firsts, lasts], axis=1)[starts != PADDING]
        places, shards, firsts, lasts = np.concatenate([tokens, self.codes]).T
        counts = lasts - firsts
        places = np.repeat(places, counts)
        order = places.argsort(kind="stable")
        return places[order], (np.repeat(shards << 32, counts) + ranges(firsts, counts))[order]

    def _file(self, place: int) -> ShardFile:
        file = self.files.get(place)
        if file is None:
            dataset, number = self.shards[place]
            file = self.files[place] = dataset.open_shard(number).file
        return file

    def _range(self, places: Int64, first: int, last: int) -> slice:
        """Return the range of ascending places that lie in the rows [first, last)."""
        return slice(*places.searchsorted((first * self.length, last * self.length)).tolist())


@dataclass(frozen=True, eq=False)
class SourceParts:
    """The spans of one source that rows read, and their parts in its shards."""

    dataset: Dataset
    chosen: Int64
    """The places of its spans among those of all rows."""
    parts: Sequence[Parts]


@dataclass(frozen=True, eq=False)
class Spread:
    """Rows, spread over the shards that they lie in."""

    located: Located
    reads: Reads
    sources: Sequence[SourceParts]

    @classmethod
    def of(cls, located: Located, dataset_of: Callable[[int], Dataset]) -> Spread:
        """Spread rows; opens their datasets."""
        reads = located.reads()
        owners = located.sources[reads.rows]
        sources = []
        for source in np.unique(owners).tolist():
            dataset, chosen = dataset_of(source), np.flatnonzero(owners == source)
            parts = dataset.split(reads.starts[chosen], reads.ends[chosen])
            sources.append(SourceParts(dataset, chosen, list(parts)))
        return cls(located, reads, sources)

    def closed_shards(self) -> list[tuple[Dataset, int]]:
        """Return the shards that are not open: a dataset, and a number in it."""
        shards = [(each.dataset, part.shard) for each in self.sources for part in each.parts]
        return [(dataset, number) for dataset, number in shards if not dataset.opened(number)]


def find(spread: Spread) -> RowPieces:
    """Find the pieces of rows; opens their shards."""
    located, reads = spread.located, spread.reads
    length = located.length + 1
    places = reads.rows * length + reads.places
    dtypes: list[np.dtype[Any]] = []
    kinds = np.empty(len(located.rows), np.int64)
    shards: list[tuple[Dataset, int]] = []
    files: dict[int, ShardFile] = {}
    found = [(NONE, NONE, NONE, NONE, NONE)]
    documents = [NONE]
    for source in spread.sources:
        dataset, chosen = source.dataset, source.chosen
        begin, starts, ends = places[chosen], reads.starts[chosen], reads.ends[chosen]
        dtype = dataset.manifest.token_type
        dtypes += [] if dtype in dtypes else [dtype]
        kinds[reads.rows[chosen]] = dtypes.index(dtype)
        for parts in source.parts:
            shard = dataset.open_shard(parts.shard)
            pieces = Pieces.of(shard, parts)
            shifts = begin[parts.spans] + parts.first - starts[parts.spans]
            owners = np.full(len(pieces.lows), len(shards))
            firsts = pieces.lows + shifts[pieces.parts]
            counts, codes = pieces.highs - pieces.lows, pieces.code_bytes(shard)
            found.append((owners, firsts, pieces.bytes, counts, codes))
            files[len(shards)] = shard.file
            shards.append((dataset, parts.shard))
            continued = starts[parts.spans] < parts.first
            spans, tokens = _documents(shard, parts.lows + ~continued, parts.highs)
            documents.append(tokens + shifts[spans])
        # The last row of a packed view may read one token more than there are: it is padding.
        beyond = np.flatnonzero(ends > dataset.tokens)
        if len(beyond):
            firsts = begin[beyond] + dataset.tokens - starts[beyond]
            owners, padding = np.full(len(beyond), len(shards)), np.full(len(beyond), PADDING)
            found.append((owners, firsts, padding, ends[beyond] - dataset.tokens, padding))
            shards.append((dataset, len(dataset.shards) - 1))
            documents.append(firsts)
    every = np.stack([np.concatenate(column) for column in zip(*found, strict=True)])
    owners, firsts, bytes, counts, codes = every[:, every[1].argsort(kind="stable")]
    widths = np.array([dtype.itemsize for dtype in dtypes], np.int64)
    row_bytes = length * int(widths.max(initial=0))
    rows, inside = np.divmod(firsts, length)
    width = widths[kinds[rows]]
    lows, sizes = rows * row_bytes + inside * width, counts * width
    copies = (owners, bytes, bytes + sizes, *_chunks(bytes, sizes), lows, lows + sizes)
    coded = codes != PADDING
    return RowPieces(
        length=length,
        dtypes=dtypes,
        kinds=kinds,
        row_bytes=row_bytes,
        shards=shards,
        files=files,
        places=firsts,
        copies=np.stack(copies, axis=1),
        codes=np.stack((firsts, owners, *_chunks(codes, counts)), axis=1)[coded],
        documents=np.sort(np.concatenate(documents)),
        joints=places[reads.places > 0],
    )


def ranges(firsts: Int64, counts: Int64) -> Int64:
    """Return the numbers [first, first + count) of each pair, one range after another."""
    before = np.cumsum(counts) - counts
    numbers: Int64 = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    return numbers


def _chunks(starts: Int64, sizes: Int64) -> tuple[Int64, Int64]:
    """Return the chunks [first, last) that hold the bytes from each start on."""
    return starts // CHUNK_BYTES, -(-(starts + sizes) // CHUNK_BYTES)


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
