"""Where rows' tokens lie: pieces of shards, contiguous in the file, in reading order.

    rows → token spans of a dataset → spans cut at shard boundaries → pieces, cut at run boundaries

All of it is array arithmetic, done for all rows that were located together: a loop over rows costs
as much as copying their tokens.
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

NO_TOKENS = np.empty(0, np.int64)
NO_CODES = (1.0,)
"""Weight table of a dataset without codes: code 0 only."""


@dataclass(frozen=True, eq=False)
class ShardPieces:
    """A shard's spans, cut into pieces that are contiguous in the file, span by span."""

    span_ids: Int64
    """[pieces] Index into the shard's spans."""
    starts: Int64
    """[pieces] First token, counted in the shard."""
    ends: Int64
    bytes: Int64
    """[pieces] First byte in the shard's file; PADDING for padding."""
    runs: Int64
    """[pieces] Run in the shard's layout."""

    @classmethod
    def cut(cls, shard: OpenShard, spans: ShardSpans) -> ShardPieces:
        layout = shard.layout
        first = layout.run_tokens.searchsorted(spans.starts, "right") - 1
        counts = layout.run_tokens.searchsorted(spans.ends, "left") - first
        span_ids = np.repeat(np.arange(len(first)), counts)
        runs = concatenate_ranges(first, counts)
        run_starts = layout.run_tokens[runs]
        starts = np.maximum(spans.starts[span_ids], run_starts)
        ends = np.minimum(spans.ends[span_ids], layout.run_tokens[runs + 1])
        run_bytes = layout.run_bytes[runs]
        bytes = run_bytes + (starts - run_starts) * shard.dtype.itemsize
        return cls(span_ids, starts, ends, np.where(run_bytes == PADDING, PADDING, bytes), runs)

    def code_bytes(self, shard: OpenShard) -> Int64:
        """[pieces] First byte of the weight codes; PADDING for pieces without codes."""
        weight_bytes = shard.layout.weight_bytes
        if weight_bytes is None:
            return np.full(len(self.runs), PADDING)
        offsets = self.starts - shard.layout.run_tokens[self.runs]
        return np.where(self.bytes == PADDING, PADDING, weight_bytes[self.runs] + offsets)


@dataclass(frozen=True, eq=False)
class ByteCopies:
    """Copies of shard bytes into rows laid side by side, in row order."""

    positions: Int64
    """[copies] Position of the first token."""
    columns: Int64
    """[copies, 7] Index into the rows' shards; bytes [start, end) in the shard's file, where start
    is PADDING for padding; chunks [first, end); bytes [low, high) in the rows laid side by side."""

    @classmethod
    def build(
        cls, positions: Int64, shards: Int64, starts: Int64, sizes: Int64, lows: Int64
    ) -> ByteCopies:
        ends = starts + sizes
        chunks = starts // CHUNK_BYTES, -(-ends // CHUNK_BYTES)
        columns = np.stack((shards, starts, ends, *chunks, lows, lows + sizes), axis=1)
        return cls(positions, columns)

    def select(self, start: int, end: int) -> list[list[int]]:
        """Return the columns for the positions [start, end)."""
        columns: list[list[int]] = self.columns[_index_range(self.positions, start, end)].tolist()
        return columns


@dataclass(frozen=True, eq=False)
class RowPieces:
    """The pieces of rows that were located together.

    Positions count tokens in the rows laid side by side, `length` per row.
    """

    length: int
    """Tokens per row, the last target included."""
    dtypes: list[np.dtype[Any]]
    dtype_ids: Int64
    """[rows] Index into `dtypes`."""
    row_bytes: int
    """Bytes of a row with the widest type."""
    shards: list[tuple[Dataset, int]]
    """Shards with pieces: dataset, and shard number."""
    files: dict[int, ShardFile]
    """Shard files, by index into `shards`. Opening a file takes as long as reading many rows; the
    rest of an open shard (document offsets) takes memory, and was only needed to find rows."""
    tables: list[Float32]
    """Loss-weight tables."""
    table_ids: Int64
    """[rows] Index into `tables`."""
    tokens: ByteCopies
    codes: ByteCopies
    """Weight codes, a byte per token."""
    padding: Int64
    """[paddings, 2] Positions [start, end)."""
    documents: Int64
    """Positions, ascending, where documents or padding begin, except at a span's first token."""
    joints: Int64
    """Positions where a row's second and later spans begin."""

    def read(self, first: int, end: int) -> tuple[StoredRows, RowWeights]:
        """Read and verify the rows [first, end)."""
        start, stop = first * self.length, end * self.length
        tokens, codes = self.tokens.select(start, stop), self.codes.select(start, stop)
        files = {shard: self._file(shard) for shard in {copy[0] for copy in (*tokens, *codes)}}
        for backing in {file.backing for file in files.values()}:
            backing.refresh()
        memory = np.empty((end - first, self.row_bytes), np.uint8)
        self._copy(tokens, files, memory, first * self.row_bytes)
        row_codes = np.zeros((end - first, self.length), np.uint8) if codes else None
        if row_codes is not None:
            self._copy(codes, files, row_codes, start)
        padding = self.padding[_index_range(self.padding[:, 0], start, stop)] - start
        return (
            StoredRows(memory, self.length, self.dtypes, self.dtype_ids[first:end]),
            RowWeights(self.length, self.tables, self.table_ids[first:end], row_codes, padding),
        )

    def _copy(
        self, copies: list[list[int]], files: dict[int, ShardFile], rows: Bytes, base: int
    ) -> None:
        """Copy file bytes into rows, which begin at byte `base` among all rows."""
        memory = rows.reshape(-1).data
        current = {shard: file.current() for shard, file in files.items()}
        for shard, start, end, first_chunk, end_chunk, low, high in copies:
            data, unread = current[shard]
            if start == PADDING:
                source = self.shards[shard][0].padding.bytes(high - low)
            elif unread.find(1, first_chunk, end_chunk) < 0:
                source = data[start:end]
            else:
                source = files[shard].read(start, end).data
            memory[low - base : high - base] = source

    def chunks(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the chunks that the rows [first, end) read: index into `shards`, and chunk
        number."""
        positions, chunks = self._chunks
        selected = _index_range(positions, first * self.length, end * self.length)
        distinct = np.unique(chunks[selected])
        shards, numbers = distinct >> 32, distinct & 0xFFFF_FFFF
        return list(zip(shards.tolist(), numbers.tolist(), strict=True))

    @cached_property
    def _chunks(self) -> tuple[Int64, Int64]:
        """The positions of pieces, ascending, and the chunks that they read, as
        shard index · 2³² + chunk number."""
        positions = np.concatenate([self.tokens.positions, self.codes.positions])
        columns = np.concatenate([self.tokens.columns, self.codes.columns])
        is_stored = columns[:, 1] != PADDING
        shards, _, _, first_chunks, end_chunks, *_ = columns[is_stored].T
        counts = end_chunks - first_chunks
        chunks = np.repeat(shards << 32, counts) + concatenate_ranges(first_chunks, counts)
        positions = np.repeat(positions[is_stored], counts)
        order = positions.argsort(kind="stable")
        return positions[order], chunks[order]

    def _file(self, shard: int) -> ShardFile:
        file = self.files.get(shard)
        if file is None:
            dataset, number = self.shards[shard]
            file = self.files[shard] = dataset.open_shard(number).file
        return file


@dataclass(frozen=True, eq=False)
class SourceSpans:
    """The spans that rows read from one source."""

    dataset: Dataset
    span_ids: Int64
    """Index into the spans of all rows."""
    by_shard: Sequence[ShardSpans]
    """The same spans, cut at shard boundaries."""


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Rows whose spans are split by source and shard."""

    located: RowLocations
    reads: TokenReads
    sources: Sequence[SourceSpans]

    @classmethod
    def split(cls, located: RowLocations, get_dataset: Callable[[int], Dataset]) -> SplitRows:
        """Split rows; opens their datasets."""
        reads = located.reads()
        span_sources = located.sources[reads.rows]
        sources = []
        for source in np.unique(span_sources).tolist():
            dataset, span_ids = get_dataset(source), np.flatnonzero(span_sources == source)
            by_shard = dataset.split(reads.starts[span_ids], reads.ends[span_ids])
            sources.append(SourceSpans(dataset, span_ids, list(by_shard)))
        return cls(located, reads, sources)

    def closed_shards(self) -> list[tuple[Dataset, int]]:
        """Return the shards that are not open: dataset, and shard number."""
        return [
            (source.dataset, spans.shard)
            for source in self.sources
            for spans in source.by_shard
            if not source.dataset.get_open_shard(spans.shard)
        ]


def find_pieces(split_rows: SplitRows) -> RowPieces:
    """Find the pieces of rows; opens their shards."""
    located, reads = split_rows.located, split_rows.reads
    length = located.length + 1
    positions = reads.rows * length + reads.offsets
    dtypes: list[np.dtype[Any]] = []
    tables: list[tuple[float, ...]] = []
    dtype_ids, table_ids = (np.empty(len(located.rows), np.int64) for _ in range(2))
    shards: list[tuple[Dataset, int]] = []
    files: dict[int, ShardFile] = {}
    batches = [(NO_TOKENS, NO_TOKENS, NO_TOKENS, NO_TOKENS, NO_TOKENS)]
    documents = [NO_TOKENS]
    for source in split_rows.sources:
        dataset, span_ids = source.dataset, source.span_ids
        span_positions = positions[span_ids]
        starts, ends = reads.starts[span_ids], reads.ends[span_ids]
        rows = reads.rows[span_ids]
        dtype_ids[rows] = _intern(dataset.manifest.token_type, dtypes)
        table_ids[rows] = _intern(dataset.manifest.weights or NO_CODES, tables)
        for spans in source.by_shard:
            shard = dataset.open_shard(spans.shard)
            pieces = ShardPieces.cut(shard, spans)
            # Token of the shard + shift = position.
            shifts = span_positions[spans.span_ids] + spans.first_token - starts[spans.span_ids]
            batches.append(
                (
                    np.full(len(pieces.starts), len(shards)),
                    pieces.starts + shifts[pieces.span_ids],
                    pieces.bytes,
                    pieces.ends - pieces.starts,
                    pieces.code_bytes(shard),
                )
            )
            files[len(shards)] = shard.file
            shards.append((dataset, spans.shard))
            continued = starts[spans.span_ids] < spans.first_token
            owners, tokens = _document_starts(shard, spans.starts + ~continued, spans.ends)
            documents.append(tokens + shifts[owners])
        # The last row of a packed view may read a token beyond the dataset's end: it is padding.
        beyond = np.flatnonzero(ends > dataset.tokens)
        if len(beyond):
            padding_starts = span_positions[beyond] + dataset.tokens - starts[beyond]
            shard_ids, padding = np.full(len(beyond), len(shards)), np.full(len(beyond), PADDING)
            counts = ends[beyond] - dataset.tokens
            batches.append((shard_ids, padding_starts, padding, counts, padding))
            shards.append((dataset, len(dataset.shards) - 1))
            documents.append(padding_starts)
    columns = np.stack([np.concatenate(column) for column in zip(*batches, strict=True)])
    shard_ids, firsts, bytes, counts, codes = columns[:, columns[1].argsort(kind="stable")]
    widths = np.array([dtype.itemsize for dtype in dtypes], np.int64)
    row_bytes = length * int(widths.max(initial=0))
    rows, offsets = np.divmod(firsts, length)
    width = widths[dtype_ids[rows]]
    is_padding, has_codes = bytes == PADDING, codes != PADDING
    return RowPieces(
        length=length,
        dtypes=dtypes,
        dtype_ids=dtype_ids,
        row_bytes=row_bytes,
        shards=shards,
        files=files,
        tables=[np.array(table, np.float32) for table in tables],
        table_ids=table_ids,
        tokens=ByteCopies.build(
            firsts, shard_ids, bytes, counts * width, rows * row_bytes + offsets * width
        ),
        codes=ByteCopies.build(
            *(column[has_codes] for column in (firsts, shard_ids, codes, counts, firsts))
        ),
        padding=np.stack([firsts, firsts + counts], axis=1)[is_padding],
        documents=np.sort(np.concatenate(documents)),
        joints=positions[reads.offsets > 0],
    )


def concatenate_ranges(firsts: Int64, counts: Int64) -> Int64:
    """Return the numbers [first, first + count) for all pairs, range after range."""
    before = np.cumsum(counts) - counts
    numbers: Int64 = np.repeat(firsts - before, counts) + np.arange(counts.sum())
    return numbers


def _index_range(positions: Int64, start: int, end: int) -> slice:
    """Return the indices of ascending positions that lie in [start, end)."""
    return slice(*positions.searchsorted((start, end)).tolist())


def _intern(value: T, values: list[T]) -> int:
    """Return a value's index in `values`; append it if it is new."""
    if value not in values:
        values.append(value)
    return values.index(value)


def _document_starts(shard: OpenShard, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """Return the tokens where documents or padding begin in ranges [start, end): range index, and
    token."""
    padding = shard.layout.padding
    owners, tokens = _select_tokens(shard.layout.document_starts[:-1], starts, ends)
    if padding is None:
        return owners, tokens
    padding_owners, padding_tokens = _select_tokens(padding[:, 0], starts, ends)
    return np.concatenate([owners, padding_owners]), np.concatenate([tokens, padding_tokens])


def _select_tokens(tokens: Int64, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """Select those among ascending tokens that lie in ranges [start, end): range index, and
    token."""
    # Equal types: otherwise all tokens would be converted first.
    first, end = (tokens.searchsorted(bounds.astype(tokens.dtype)) for bounds in (starts, ends))
    owners = np.repeat(np.arange(len(starts)), end - first)
    return owners, tokens[concatenate_ranges(first, end - first)].astype(np.int64)
