"""Gather rows from shards: find where their tokens lie, then copy the bytes.

    rows → token spans of a dataset → spans of a shard → pieces, contiguous in the shard's file

A position counts tokens in the rows laid side by side, each with its last target.

Pieces are found by array arithmetic for all rows that were located together: a loop over rows costs
as much as copying their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

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


class PieceTable(NamedTuple):
    """Pieces of several shards. All columns are [pieces]."""

    shard_ids: Int64
    """Index into `RowPieces.shards`."""
    positions: Int64
    """Position of the first token."""
    counts: Int64
    """Number of tokens."""
    token_bytes: Int64
    """First byte of the tokens in the shard's file; PADDING for padding."""
    code_bytes: Int64
    """First byte of the weight codes; PADDING for pieces without codes."""

    @classmethod
    def join(cls, tables: Sequence[PieceTable]) -> PieceTable:
        """Join tables, and sort the pieces by position."""
        empty = cls(*[NO_TOKENS] * 5)
        joined = cls(*map(np.concatenate, zip(empty, *tables, strict=True)))
        return joined.select(joined.positions.argsort(kind="stable"))

    def select(self, pieces: Int64 | npt.NDArray[np.bool_]) -> PieceTable:
        """Select pieces by index or by mask."""
        return PieceTable(*(column[pieces] for column in self))


@dataclass(frozen=True, eq=False)
class ByteCopies:
    """Copies of shard bytes into rows laid side by side, in row order."""

    positions: Int64
    """[copies] Position of the first token."""
    columns: Int64
    """[copies, 7] What `RowPieces._copy` needs of each copy:

    shard                    index into `RowPieces.shards`
    start, end               bytes [start, end) in the shard's file; `start` is PADDING for padding
    first_chunk, end_chunk   chunks of the file with these bytes
    out_start, out_end       bytes [out_start, out_end) in the rows laid side by side
    """

    @classmethod
    def build(
        cls, positions: Int64, shard_ids: Int64, starts: Int64, sizes: Int64, out_starts: Int64
    ) -> ByteCopies:
        """`sizes`: bytes to copy. All arguments are [copies]."""
        ends = starts + sizes
        chunks = starts // CHUNK_BYTES, -(-ends // CHUNK_BYTES)
        columns = (shard_ids, starts, ends, *chunks, out_starts, out_starts + sizes)
        return cls(positions, np.stack(columns, axis=1))

    def select(self, start: int, end: int) -> list[list[int]]:
        """Return `columns` for the positions [start, end)."""
        columns: list[list[int]] = self.columns[_index_range(self.positions, start, end)].tolist()
        return columns


@dataclass(frozen=True, eq=False)
class RowPieces:
    """The pieces of rows that were located together."""

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
    document_starts: Int64
    """Positions, ascending, where documents or padding begin, except at a span's first token."""
    joints: Int64
    """Positions where a row's second and later spans begin."""

    def read(self, first_row: int, end_row: int) -> tuple[StoredRows, RowWeights]:
        """Read and verify the rows [first_row, end_row), by index among the located rows."""
        num_rows = end_row - first_row
        start, end = first_row * self.length, end_row * self.length
        tokens, codes = self.tokens.select(start, end), self.codes.select(start, end)
        files = {shard: self._file(shard) for shard in {copy[0] for copy in (*tokens, *codes)}}
        for backing in {file.backing for file in files.values()}:
            backing.refresh()
        memory = np.empty((num_rows, self.row_bytes), np.uint8)
        self._copy(tokens, files, memory, first_row * self.row_bytes)
        row_codes = np.zeros((num_rows, self.length), np.uint8) if codes else None
        if row_codes is not None:
            self._copy(codes, files, row_codes, start)
        padding = self.padding[_index_range(self.padding[:, 0], start, end)] - start
        dtype_ids, table_ids = self.dtype_ids[first_row:end_row], self.table_ids[first_row:end_row]
        return (
            StoredRows(memory, self.length, self.dtypes, dtype_ids),
            RowWeights(self.length, self.tables, table_ids, row_codes, padding),
        )

    def _copy(
        self, copies: list[list[int]], files: dict[int, ShardFile], out: Bytes, out_offset: int
    ) -> None:
        """Copy file bytes into the rows `out`, whose first byte is `out_offset` among all rows."""
        memory = out.reshape(-1).data
        current = {shard: file.current() for shard, file in files.items()}
        for shard, start, end, first_chunk, end_chunk, out_start, out_end in copies:
            data, unread_chunks = current[shard]
            if start == PADDING:
                source = self.shards[shard][0].padding.bytes(out_end - out_start)
            elif unread_chunks.find(1, first_chunk, end_chunk) < 0:
                source = data[start:end]
            else:
                source = files[shard].read(start, end).data
            memory[out_start - out_offset : out_end - out_offset] = source

    def chunks(self, first_row: int, end_row: int) -> list[tuple[int, int]]:
        """Return the chunks that the rows [first_row, end_row) read: index into `shards`, and chunk
        number."""
        positions, chunks = self._chunks
        selected = _index_range(positions, first_row * self.length, end_row * self.length)
        distinct = np.unique(chunks[selected])
        shard_ids, numbers = distinct >> 32, distinct & 0xFFFF_FFFF
        return list(zip(shard_ids.tolist(), numbers.tolist(), strict=True))

    @cached_property
    def _chunks(self) -> tuple[Int64, Int64]:
        """Positions, ascending, and the chunks read there, as shard id · 2³² + chunk number: a copy
        is listed once per chunk."""
        positions = np.concatenate([self.tokens.positions, self.codes.positions])
        columns = np.concatenate([self.tokens.columns, self.codes.columns])
        is_stored = columns[:, 1] != PADDING
        shard_ids, _, _, first_chunks, end_chunks, *_ = columns[is_stored].T
        counts = end_chunks - first_chunks
        chunks = np.repeat(shard_ids << 32, counts) + concatenate_ranges(first_chunks, counts)
        positions = np.repeat(positions[is_stored], counts)
        order = positions.argsort(kind="stable")
        return positions[order], chunks[order]

    def _file(self, shard: int) -> ShardFile:
        """Return a shard's file; open it if `files` lacks it (prefetch.py clears them)."""
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
    """[spans] Index into the spans of all rows."""
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
    weight_tables: list[tuple[float, ...]] = []
    dtype_ids, table_ids = (np.empty(len(located.rows), np.int64) for _ in range(2))
    shards: list[tuple[Dataset, int]] = []
    files: dict[int, ShardFile] = {}
    piece_tables: list[PieceTable] = []
    document_starts = [NO_TOKENS]
    for source in split_rows.sources:
        dataset, span_ids = source.dataset, source.span_ids
        starts, ends = reads.starts[span_ids], reads.ends[span_ids]
        shifts = positions[span_ids] - starts  # position = token of the dataset + shift
        rows = reads.rows[span_ids]
        dtype_ids[rows] = _intern(dataset.manifest.token_type, dtypes)
        table_ids[rows] = _intern(dataset.manifest.weights or NO_CODES, weight_tables)
        for spans in source.by_shard:
            shard = dataset.open_shard(spans.shard)
            shard_shifts = spans.first_token + shifts[spans.span_ids]
            piece_tables.append(cut_pieces(shard, spans, shard_shifts, len(shards)))
            files[len(shards)] = shard.file
            shards.append((dataset, spans.shard))
            # Not at a span's first token: a row or a joint begins there.
            is_first = starts[spans.span_ids] >= spans.first_token
            search_starts = spans.starts + is_first.astype(np.int64)
            owners, tokens = _document_starts(shard, search_starts, spans.ends)
            document_starts.append(tokens + shard_shifts[owners])
        # The last row of a packed view may read a token beyond the dataset's end: it is padding,
        # as if in the last shard.
        beyond = np.flatnonzero(ends > dataset.tokens)
        if len(beyond):
            padding_starts = dataset.tokens + shifts[beyond]
            shard_ids, padding = np.full(len(beyond), len(shards)), np.full(len(beyond), PADDING)
            counts = ends[beyond] - dataset.tokens
            piece_tables.append(PieceTable(shard_ids, padding_starts, counts, padding, padding))
            shards.append((dataset, len(dataset.shards) - 1))
            document_starts.append(padding_starts)
    pieces = PieceTable.join(piece_tables)
    is_padding = pieces.token_bytes == PADDING
    widths = np.array([dtype.itemsize for dtype in dtypes], np.int64)
    row_bytes = length * int(widths.max(initial=0))
    return RowPieces(
        length=length,
        dtypes=dtypes,
        dtype_ids=dtype_ids,
        row_bytes=row_bytes,
        shards=shards,
        files=files,
        tables=[np.array(table, np.float32) for table in weight_tables],
        table_ids=table_ids,
        tokens=_list_token_copies(pieces, length, row_bytes, widths[dtype_ids]),
        codes=_list_code_copies(pieces),
        padding=np.stack([pieces.positions, pieces.positions + pieces.counts], axis=1)[is_padding],
        document_starts=np.sort(np.concatenate(document_starts)),
        joints=positions[reads.offsets > 0],
    )


def cut_pieces(shard: OpenShard, spans: ShardSpans, shifts: Int64, shard_id: int) -> PieceTable:
    """Cut a shard's spans into pieces where its runs end, span by span. `shifts` [spans]: position
    less token of the shard."""
    layout = shard.layout
    first_runs = layout.run_tokens.searchsorted(spans.starts, "right") - 1
    counts = layout.run_tokens.searchsorted(spans.ends, "left") - first_runs
    span_ids = np.repeat(np.arange(len(counts)), counts)
    run_ids = concatenate_ranges(first_runs, counts)
    run_starts, run_ends = layout.run_tokens[run_ids], layout.run_tokens[run_ids + 1]
    starts = np.maximum(spans.starts[span_ids], run_starts)
    ends = np.minimum(spans.ends[span_ids], run_ends)
    offsets, run_bytes = starts - run_starts, layout.run_bytes[run_ids]
    token_bytes = run_bytes + offsets * shard.dtype.itemsize
    code_bytes = np.full_like(starts, PADDING)
    if layout.weight_bytes is not None:
        code_bytes = layout.weight_bytes[run_ids] + offsets
    is_padding = run_bytes == PADDING
    return PieceTable(
        shard_ids=np.full_like(starts, shard_id),
        positions=starts + shifts[span_ids],
        counts=ends - starts,
        token_bytes=np.where(is_padding, PADDING, token_bytes),
        code_bytes=np.where(is_padding, PADDING, code_bytes),
    )


def _list_token_copies(
    pieces: PieceTable, length: int, row_bytes: int, row_widths: Int64
) -> ByteCopies:
    """List the copies of tokens, padding included, into rows of `row_bytes` bytes. `row_widths`
    [rows]: bytes per token."""
    rows, offsets = np.divmod(pieces.positions, length)
    widths = row_widths[rows]
    return ByteCopies.build(
        pieces.positions,
        pieces.shard_ids,
        pieces.token_bytes,
        pieces.counts * widths,
        rows * row_bytes + offsets * widths,
    )


def _list_code_copies(pieces: PieceTable) -> ByteCopies:
    """List the copies of weight codes. A code is a byte, so it is copied to the byte `position`."""
    pieces = pieces.select(pieces.code_bytes != PADDING)
    return ByteCopies.build(
        pieces.positions, pieces.shard_ids, pieces.code_bytes, pieces.counts, pieces.positions
    )


def concatenate_ranges(firsts: Int64, counts: Int64) -> Int64:
    """Return the numbers [first, first + count) for all pairs, range after range."""
    counts_before = np.cumsum(counts) - counts
    numbers: Int64 = np.repeat(firsts - counts_before, counts) + np.arange(counts.sum())
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
    """Return where documents or padding begin in token ranges [start, end): range index, and
    token."""
    padding = shard.layout.padding
    owners, tokens = _select_tokens(shard.layout.document_starts[:-1], starts, ends)
    if padding is None:
        return owners, tokens
    padding_owners, padding_tokens = _select_tokens(padding[:, 0], starts, ends)
    return np.concatenate([owners, padding_owners]), np.concatenate([tokens, padding_tokens])


def _select_tokens(tokens: Int64, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """Select, among ascending tokens, those in the ranges [start, end), range by range: range
    index, and token."""
    # Equal types: otherwise all tokens would be converted first.
    first, end = (tokens.searchsorted(bounds.astype(tokens.dtype)) for bounds in (starts, ends))
    owners = np.repeat(np.arange(len(starts)), end - first)
    return owners, tokens[concatenate_ranges(first, end - first)].astype(np.int64)
