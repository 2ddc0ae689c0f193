"""Arrow: IPC files (also called Feather 2) and IPC streams; one document per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...dataplane.shards.arrow_ipc import batch_rows
from ..files.input_file import DamagedFile, File
from ..files.open_file import open_input
from .columns import column_kinds, columns_to_read, read_texts, schema_problem, split_batch
from .fields import FieldKind
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts


class Arrow(CorpusFormat):
    """Arrow IPC files, sliced by record batches, and streams, which are one slice."""

    endings = ("arrow", "feather", "ipc")
    settings = ("text_field", "id_field", "keep", "chat")
    compressible = False

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        if not hasattr(_open(file), "num_record_batches"):
            return [Slice(file, 0, -1, 0, file.size)]  # an IPC stream has no index
        with open_input(file) as stream:

            def read(start: int, end: int) -> bytes:
                stream.seek(start)
                return stream.read(end - start)

            rows = batch_rows(read, file.size)
        count = len(rows)
        step = max(1, count * size // max(1, file.size))
        slices = []
        for start in range(0, count, step):
            end = min(count, start + step)
            share = file.size * (end - start) // count
            slices.append(Slice(file, start, end, sum(rows[:start]), share))
        return slices

    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        import pyarrow as pa

        name = file_slice.file.name
        try:
            reader = _open(file_slice.file)
        except DamagedFile as error:
            yield Texts(
                [], [], None, [BadRecord("damaged file", str(error), name)], file_slice.size
            )
            return
        if (problem := schema_problem(reader.schema, file_slice, config)) is not None:
            yield problem
            return
        number = file_slice.first
        try:
            columns = columns_to_read(reader.schema, config)
            for batch in _batches(reader, file_slice):
                yield Texts([], [], size=batch.nbytes)
                for piece in split_batch(batch.select(columns), config, limits):
                    yield read_texts(piece, number, config, limits, name, "row", 0)
                    number += len(piece)
        except (pa.ArrowInvalid, OSError) as error:
            yield Texts([], [], None, [BadRecord("damaged file", str(error), name, number, "row")])

    def field_kinds(
        self, file_slice: Slice, names: Sequence[str]
    ) -> dict[str, set[FieldKind | str]]:
        reader = _open(file_slice.file)
        return column_kinds(reader.schema, names)


FORMAT = Arrow()


def _batches(reader: Any, file_slice: Slice) -> Iterator[Any]:
    if file_slice.end < 0:
        yield from reader
        return
    for number in range(file_slice.start, file_slice.end):
        yield reader.get_batch(number)


def _open(file: File) -> Any:
    import pyarrow as pa

    try:
        stream = open_input(file)
        head = stream.read(6)
        stream.seek(0)
        return pa.ipc.open_file(stream) if head == b"ARROW1" else pa.ipc.open_stream(stream)
    except (pa.ArrowInvalid, OSError) as error:
        raise DamagedFile(f"this is not an Arrow file ({error})") from None
