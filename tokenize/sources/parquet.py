"""Parquet: a row a document, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import BLOCK_BYTES, BadRecord, Broken, File, Slice, SourceConfig, Texts
from .columns import other_schema, pieces, texts_of, wanted
from .files import open_file

ROWS = 256
"""Rows read at once, at most."""
PAGE_BYTES = 1 << 20


def cut(file: File, config: SourceConfig, size: int) -> list[Slice]:
    with _open(file.name) as opened:
        meta = opened.metadata
        slices: list[Slice] = []
        start = first = rows = total = 0
        for number in range(meta.num_row_groups):
            group = meta.row_group(number)
            rows += group.num_rows
            total += group.total_byte_size
            if total >= size or number == meta.num_row_groups - 1:
                share = file.size * (number + 1 - start) // meta.num_row_groups
                slices.append(Slice(file, start, number + 1, first, share))
                start, first, total = number + 1, rows, 0
    return slices


def read(part: Slice, config: SourceConfig) -> Iterator[Texts]:
    import pyarrow as pa

    name = part.file.name
    try:
        opened = _open(name)
    except Broken as error:
        yield Texts([], [], None, [BadRecord("damaged file", str(error), name)], part.size)
        return
    with opened:
        if (nothing := other_schema(opened.schema_arrow, part, config)) is not None:
            yield nothing
            return
        number = part.first
        groups = [opened.metadata.row_group(group) for group in range(part.start, part.end)]
        rows = sum(group.num_rows for group in groups)
        total = sum(group.total_byte_size for group in groups)
        try:
            for batch in opened.iter_batches(
                min(ROWS, 1 + BLOCK_BYTES * rows // max(1, total)),
                row_groups=list(range(part.start, part.end)),
                columns=wanted(config),
                use_threads=False,
            ):
                for piece in pieces(batch, config):
                    size = part.size * len(piece) // max(1, rows)
                    yield texts_of(piece, number, config, name, "row", size)
                    number += len(piece)
        except (pa.ArrowInvalid, OSError) as error:
            problem = BadRecord("damaged file", str(error), name, number, "row")
            yield Texts([], [], None, [problem])


def _open(name: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Pages are read as they are needed: a row group may be larger than memory.
        return pq.ParquetFile(open_file(name), buffer_size=PAGE_BYTES, pre_buffer=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise Broken(f"this is not a Parquet file ({error})") from None
