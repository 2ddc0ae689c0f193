"""Write the order for other tools: which tokens of which documents each row holds, as Parquet.

A line is a piece of a document in a row. Tables of documents are read, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...dataplane.arrays import Int64, arrow_column, arrow_numbers, expand_ranges
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.loader.rows import RowReader
from ...dataplane.order.plan import Plan
from ...dataplane.order.stream import RowLocations
from ...dataplane.storage import atomic

BLOCK_ROWS = 8192
"""Rows located together, and of a row group."""
MAX_SHARDS = 64
"""Shards whose origins are kept."""


def export_rows(reader: RowReader, rows: range, out: Path, *, block_rows: int = BLOCK_ROWS) -> int:
    """Write the pieces of documents in a plan's rows; return their number."""
    import pyarrow.parquet as pq

    num_pieces = 0
    with atomic.replacing(out) as file, pq.ParquetWriter(file, _schema()) as writer:
        for table in tables(reader, rows, block_rows):
            writer.write_table(table)
            num_pieces += len(table)
    return num_pieces


def read_table(plan: Plan, rows: range) -> Any:
    """Return the pieces of documents in a plan's rows as an Arrow table."""
    import pyarrow as pa

    listed = tables(RowReader(plan), rows)
    return pa.concat_tables([_schema().empty_table(), *listed])


def tables(reader: RowReader, rows: range, block_rows: int = BLOCK_ROWS) -> Iterator[Any]:
    """Yield the pieces of documents in a plan's rows, an Arrow table for each block of rows."""
    import pyarrow as pa

    @lru_cache(MAX_SHARDS)
    def origins(source: int, shard: int) -> Any:
        return _read_origins(reader.dataset(source), shard)

    for phase in reader.plan.phases:
        first_row, end_row = max(rows.start, phase.first_row), min(rows.stop, phase.end_row)
        for start in range(first_row, end_row, block_rows):
            located = reader.stream.locate(np.arange(start, min(start + block_rows, end_row)))
            pieces = _find_pieces(reader, located)
            source, shard, in_shard, document, row, *numbers = pieces
            named = _find_origins(origins, source, shard, in_shard)
            names = [planned.name for planned in reader.plan.sources]
            steps = phase.first_step + (row - phase.first_row) // phase.batch_rows
            columns = [
                arrow_numbers(row),
                arrow_numbers(steps),
                arrow_column([phase.name] * len(row), pa.string()),
                arrow_column([names[index] for index in source.tolist()], pa.string()),
                arrow_numbers(document),
                *named.columns,
                *map(arrow_numbers, numbers),
            ]
            yield pa.Table.from_arrays(columns, schema=_schema())


def _read_origins(dataset: Dataset, shard: int) -> Any:
    """Return the ids, files and positions of a shard's documents as an Arrow table: objects would
    take ten times the memory."""
    import pyarrow as pa

    opened = dataset.open_shard(shard)
    origins = opened.origins(0, opened.shard.documents)
    return pa.table(
        {
            "id": arrow_column([origin.id for origin in origins], pa.string()),
            "file": arrow_column(
                [origin.file for origin in origins], pa.string()
            ).dictionary_encode(),
            "position": arrow_column([origin.position for origin in origins], pa.int64()),
        }
    )


def _find_origins(
    origins: Callable[[int, int], Any], sources: Int64, shards: Int64, documents: Int64
) -> Any:
    """Return a table with the origin of each piece."""
    import pyarrow as pa

    order = np.lexsort([shards, sources])
    is_first = np.diff(sources[order], prepend=-1) | np.diff(shards[order], prepend=-1)
    groups = np.split(order, np.flatnonzero(is_first)[1:])
    parts = [
        origins(int(sources[group[0]]), int(shards[group[0]])).take(arrow_numbers(documents[group]))
        for group in groups
        if len(group)
    ]
    schema = pa.schema([_schema().field(name) for name in ("id", "file", "position")])
    listed = pa.concat_tables([part.cast(schema) for part in [*parts, schema.empty_table()]])
    return listed.combine_chunks().take(arrow_numbers(np.argsort(order)))


def _schema() -> Any:
    import pyarrow as pa

    texts = {"phase", "source", "id", "file"}
    names = ["row", "step", "phase", "source", "document", "id", "file", "position"]
    names += ["epoch", "first", "tokens", "at"]
    return pa.schema([(name, pa.string() if name in texts else pa.int64()) for name in names])


def _find_pieces(reader: RowReader, located: RowLocations) -> Int64:
    """Return [9, pieces], sorted by row and position: source, shard, document in the shard,
    document, row, epoch, first token in the document, tokens, first token in the row."""
    reads = located.reads()
    is_last = np.append(reads.rows[1:] != reads.rows[:-1], True)  # with the last target
    ends, read_sources = reads.ends - is_last, located.sources[reads.rows]
    groups = [np.empty((9, 0), np.int64)]
    for source in np.unique(read_sources).tolist():
        read_ids = np.flatnonzero(read_sources == source)
        dataset = reader.dataset(source)
        for spans, low, high, documents, starts in _cut(
            dataset, reads.starts[read_ids], ends[read_ids]
        ):
            shard, owners = spans
            reads_of_pieces = read_ids[owners]
            rows = reads.rows[reads_of_pieces]
            groups.append(
                np.stack(
                    [
                        np.full(len(rows), source),
                        np.full(len(rows), shard),
                        documents,
                        dataset.shard_documents[shard] + documents,
                        located.rows[rows],
                        located.epochs[rows],
                        low - starts,
                        high - low,
                        reads.offsets[reads_of_pieces] + low - reads.starts[reads_of_pieces],
                    ]
                )
            )
    pieces = np.concatenate(groups, axis=1)
    return np.ascontiguousarray(pieces[:, np.lexsort([pieces[8], pieces[4]])])


def _cut(
    dataset: Dataset, starts: Int64, ends: Int64
) -> Iterator[tuple[tuple[int, Int64], Int64, Int64, Int64, Int64]]:
    """Cut token spans at documents, shard by shard. Yields the shard and the span of each piece,
    its token range, the document in the shard, and the document's first token."""
    for spans in dataset.split(starts, ends):
        layout = dataset.open_shard(spans.shard).layout
        document_starts = layout.document_starts.astype(np.int64)
        first = np.searchsorted(document_starts, spans.starts, side="right") - 1
        end = np.searchsorted(document_starts[:-1], spans.ends)
        owners, documents = expand_ranges(first, end)
        begins = document_starts[documents]
        low = np.maximum(spans.starts[owners], begins)
        high = np.minimum(spans.ends[owners], begins + layout.document_tokens[documents])
        kept = low < high  # not padding, nor an empty document
        yield (
            (spans.shard, spans.span_ids[owners][kept]),
            spans.first_token + low[kept],
            spans.first_token + high[kept],
            documents[kept],
            spans.first_token + begins[kept],
        )
