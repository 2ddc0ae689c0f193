"""Parquet: one document per row, read one row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..files.input_file import DamagedFile, File
from ..files.open_file import open_input
from .columns import column_kinds, columns_to_read, read_texts, schema_problem, split_batch
from .fields import FieldKind
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts

ROWS = 256
"""Upper bound on the rows read at once."""
PAGE_BYTES = 1 << 20


class Parquet(CorpusFormat):
    """Parquet files; a slice is a row-group range."""

    endings = ("parquet", "pq")
    settings = ("text_field", "id_field", "keep", "chat")
    compressible = False

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        with _open(file) as parquet_file:
            meta = parquet_file.metadata
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

    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        import pyarrow as pa

        name = file_slice.file.name
        try:
            parquet_file = _open(file_slice.file)
        except DamagedFile as error:
            yield Texts(
                [], [], None, [BadRecord("damaged file", str(error), name)], file_slice.size
            )
            return
        with parquet_file:
            problem = schema_problem(parquet_file.schema_arrow, file_slice, config)
            if problem is not None:
                yield problem
                return
            number = file_slice.first
            row_groups = range(file_slice.start, file_slice.end)
            groups = [parquet_file.metadata.row_group(group) for group in row_groups]
            rows = sum(group.num_rows for group in groups)
            total = sum(group.total_byte_size for group in groups)
            try:
                for batch in parquet_file.iter_batches(
                    min(ROWS, 1 + limits.block_bytes * rows // max(1, total)),
                    row_groups=list(row_groups),
                    columns=columns_to_read(parquet_file.schema_arrow, config),
                    use_threads=False,
                ):
                    for piece in split_batch(batch, config, limits):
                        size = file_slice.size * len(piece) // max(1, rows)
                        yield read_texts(piece, number, config, limits, name, "row", size)
                        number += len(piece)
            except (pa.ArrowInvalid, OSError) as error:
                yield Texts(
                    [], [], None, [BadRecord("damaged file", str(error), name, number, "row")]
                )

    def field_kinds(
        self, file_slice: Slice, names: Sequence[str]
    ) -> dict[str, set[FieldKind | str]]:
        with _open(file_slice.file) as parquet_file:
            return column_kinds(parquet_file.schema_arrow, names)


FORMAT = Parquet()


def _open(file: File) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Read page by page: a row group may be larger than memory.
        return pq.ParquetFile(open_input(file), buffer_size=PAGE_BYTES, pre_buffer=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise DamagedFile(f"this is not a Parquet file ({error})") from None
