"""Where the tokens of rows lie: pieces of shards, each contiguous in its file, in reading order.

    rows → spans of a dataset → parts, each in one shard → pieces, each in one run of the shard

All of it is arithmetic on arrays, done for all rows that were located together: a walk over single
rows costs as much as copying their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ..arrays import Bytes, Int64
from ..datasets.chunks import CHUNK_BYTES
from ..datasets.dataset import Dataset, ShardSpans
from ..datasets.open_shard import OpenShard
from ..datasets.shard_file import ShardFile
from ..order.stream import RowLocations, TokenReads
from ..shards.format import PADDING
from .row_weights import Float32, RowWeights
from .stored_rows import StoredRows

T = TypeVar("T")

NONE = np.empty(0, np.int64)
NO_CODES = (1.0,)
"""The weights of the codes of a dataset without codes: of code 0."""


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
    def of(cls, shard: OpenShard, parts: ShardSpans) -> Pieces:
        layout = shard.layout
        first = layout.run_tokens.searchsorted(parts.starts, "right") - 1
        counts = layout.run_tokens.searchsorted(parts.ends, "left") - first
        owners = np.repeat(np.arange(len(first)), counts)
        runs = ranges(first, counts)
        starts = layout.run_tokens[runs]
        lows = np.maximum(parts.starts[owners], starts)
        highs = np.minimum(parts.ends[owners], layout.run_tokens[runs + 1])
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
class Copies:
    """Copies of bytes of shards into rows laid side by side, in the order of the rows."""

    places: Int64
    """The first place of each."""
    columns: Int64
    """[copies, 7] The place of its shard among those of the rows; its bytes [start, end) there, of
    which the start is PADDING if it has none; its chunks [first, last); and its bytes [low, high)
    in the rows laid side by side."""

    @classmethod
    def of(cls, places: Int64, shards: Int64, starts: Int64, sizes: Int64, lows: Int64) -> Copies:
        ends = starts + sizes
        chunks = starts // CHUNK_BYTES, -(-ends // CHUNK_BYTES)
        columns = np.stack((shards, starts, ends, *chunks, lows, lows + sizes), axis=1)
        return cls(places, columns)

    def between(self, first: int, last: int) -> list[list[int]]:
        """Return the columns of the copies to the places [first, last)."""
        columns: list[list[int]] = self.columns[_range(self.places, first, last)].tolist()
        return columns


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
    tables: list[Float32]
    table_kinds: Int64
    """The place of each row's table of weights among `tables`."""
    tokens: Copies
    codes: Copies
    """Of the weight codes of tokens: a byte for each."""
    padding: Int64
    """[paddings, 2]: places [low, high)."""
    documents: Int64
    """Places, ascending, after the first of a span at which documents or padding begin."""
    joints: Int64
    """Places at which another span of a row begins."""

    def read(self, first: int, last: int) -> tuple[StoredRows, RowWeights]:
        """Read the rows [first, last), and verify their bytes."""
        begin, end = first * self.length, last * self.length
        tokens, codes = self.tokens.between(begin, end), self.codes.between(begin, end)
        files = {place: self._file(place) for place in {copy[0] for copy in (*tokens, *codes)}}
        for backing in {file.backing for file in files.values()}:
            backing.refresh()
        memory = np.empty((last - first, self.row_bytes), np.uint8)
        self._copy(tokens, files, memory, first * self.row_bytes)
        coded = np.zeros((last - first, self.length), np.uint8) if codes else None
        if coded is not None:
            self._copy(codes, files, coded, begin)
        padding = self.padding[_range(self.padding[:, 0], begin, end)] - begin
        return (
            StoredRows(memory, self.length, self.dtypes, self.kinds[first:last]),
            RowWeights(self.length, self.tables, self.table_kinds[first:last], coded, padding),
        )

    def _copy(
        self, copies: list[list[int]], files: dict[int, ShardFile], rows: Bytes, base: int
    ) -> None:
        """Copy bytes of files into rows, of which the first begins at `base` among all."""
        memory = rows.reshape(-1).data
        current = {place: file.current() for place, file in files.items()}
        for place, start, end, first_chunk, last_chunk, low, high in copies:
            data, unread = current[place]
            if start == PADDING:
                part = self.shards[place][0].padding.bytes(high - low)
            elif unread.find(1, first_chunk, last_chunk) < 0:
                part = data[start:end]
            else:
                part = files[place].read(start, end).data
            memory[low - base : high - base] = part

    def chunks(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the chunks that the rows [first, last) read: the place of the shard of each, and
        its number there."""
        places, chunks = self._chunks
        part = _range(places, first * self.length, last * self.length)
        distinct = np.unique(chunks[part])
        shards, numbers = distinct >> 32, distinct & 0xFFFF_FFFF
        return list(zip(shards.tolist(), numbers.tolist(), strict=True))

    @cached_property
    def _chunks(self) -> tuple[Int64, Int64]:
        """The chunks that pieces read, after their first places, ascending. A chunk is the place of
        its shard, times 2³², plus its number."""
        places = np.concatenate([self.tokens.places, self.codes.places])
        columns = np.concatenate([self.tokens.columns, self.codes.columns])
        stored = columns[:, 1] != PADDING
        shards, _, _, firsts, lasts, *_ = columns[stored].T
        counts = lasts - firsts
        places = np.repeat(places[stored], counts)
        order = places.argsort(kind="stable")
        return places[order], (np.repeat(shards << 32, counts) + ranges(firsts, counts))[order]

    def _file(self, place: int) -> ShardFile:
        file = self.files.get(place)
        if file is None:
            dataset, number = self.shards[place]
            file = self.files[place] = dataset.open_shard(number).file
        return file


@dataclass(frozen=True, eq=False)
class SourceParts:
    """The spans of one source that rows read, and their parts in its shards."""

    dataset: Dataset
    chosen: Int64
    """The places of its spans among those of all rows."""
    parts: Sequence[ShardSpans]


@dataclass(frozen=True, eq=False)
class Spread:
    """Rows, spread over the shards that they lie in."""

    located: RowLocations
    reads: TokenReads
    sources: Sequence[SourceParts]

    @classmethod
    def of(cls, located: RowLocations, dataset_of: Callable[[int], Dataset]) -> Spread:
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
        return [
            (dataset, number) for dataset, number in shards if not dataset.get_open_shard(number)
        ]


def find(spread: Spread) -> RowPieces:
    """Find the pieces of rows; opens their shards."""
    located, reads = spread.located, spread.reads
    length = located.length + 1
    places = reads.rows * length + reads.offsets
    dtypes: list[np.dtype[Any]] = []
    tables: list[tuple[float, ...]] = []
    kinds, table_kinds = (np.empty(len(located.rows), np.int64) for _ in range(2))
    shards: list[tuple[Dataset, int]] = []
    files: dict[int, ShardFile] = {}
    found = [(NONE, NONE, NONE, NONE, NONE)]
    documents = [NONE]
    for source in spread.sources:
        dataset, chosen = source.dataset, source.chosen
        begin, starts, ends = places[chosen], reads.starts[chosen], reads.ends[chosen]
        rows = reads.rows[chosen]
        kinds[rows] = _place(dataset.manifest.token_type, dtypes)
        table_kinds[rows] = _place(dataset.manifest.weights or NO_CODES, tables)
        for parts in source.parts:
            shard = dataset.open_shard(parts.shard)
            pieces = Pieces.of(shard, parts)
            shifts = begin[parts.span_ids] + parts.first_token - starts[parts.span_ids]
            owners = np.full(len(pieces.lows), len(shards))
            firsts = pieces.lows + shifts[pieces.parts]
            counts, codes = pieces.highs - pieces.lows, pieces.code_bytes(shard)
            found.append((owners, firsts, pieces.bytes, counts, codes))
            files[len(shards)] = shard.file
            shards.append((dataset, parts.shard))
            continued = starts[parts.span_ids] < parts.first_token
            spans, tokens = _documents(shard, parts.starts + ~continued, parts.ends)
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
    padding, coded = bytes == PADDING, codes != PADDING
    return RowPieces(
        length=length,
        dtypes=dtypes,
        kinds=kinds,
        row_bytes=row_bytes,
        shards=shards,
        files=files,
        tables=[np.array(table, np.float32) for table in tables],
        table_kinds=table_kinds,
        tokens=Copies.of(firsts, owners, bytes, counts * width, rows * row_bytes + inside * width),
        codes=Copies.of(*(column[coded] for column in (firsts, owners, codes, counts, firsts))),
        padding=np.stack([firsts, firsts + counts], axis=1)[padding],
        documents=np.sort(np.concatenate(documents)),
        joints=places[reads.offsets > 0],
    )


def ranges(firsts: Int64, counts: Int64) -> Int64:
    """Return the numbers [first, first + count) of each pair, one range after another."""
    before = np.cumsum(counts) - counts
    numbers: Int64 = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    return numbers


def _range(places: Int64, first: int, last: int) -> slice:
    """Return the range of ascending places that lie in [first, last)."""
    return slice(*places.searchsorted((first, last)).tolist())


def _place(value: T, values: list[T]) -> int:
    """Return the place of a value among others; append it if it is new."""
    if value not in values:
        values.append(value)
    return values.index(value)


def _documents(shard: OpenShard, lows: Int64, highs: Int64) -> tuple[Int64, Int64]:
    """Return the tokens in [low, high) at which documents or padding begin, after the index of
    their range."""
    padding = shard.layout.padding
    owners, tokens = _between(shard.layout.document_starts[:-1], lows, highs)
    if padding is None:
        return owners, tokens
    gap_owners, gaps = _between(padding[:, 0], lows, highs)
    return np.concatenate([owners, gap_owners]), np.concatenate([tokens, gaps])


def _between(starts: Int64, lows: Int64, highs: Int64) -> tuple[Int64, Int64]:
    """Return the ascending starts in [low, high), after the index of their range."""
    # Equal types: otherwise all starts would be converted first.
    first, last = (starts.searchsorted(ends.astype(starts.dtype)) for ends in (lows, highs))
    owners = np.repeat(np.arange(len(lows)), last - first)
    return owners, starts[ranges(first, last - first)].astype(np.int64)
