"""Arrow: IPC files (also called Feather 2) and IPC streams; a row a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...dataplane.shards.arrow import batch_rows
from . import BadRecord, Broken, File, Slice, SourceConfig, Texts
from .columns import other_schema, pieces, texts_of, wanted
from .files import open_file


def cut(file: File, config: SourceConfig, size: int) -> list[Slice]:
    if not hasattr(_open(file.name), "num_record_batches"):
        return [Slice(file, 0, -1, 0, file.size)]  # a stream has no index
    with open_file(file.name) as stream:

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


def read(part: Slice, config: SourceConfig) -> Iterator[Texts]:
    import pyarrow as pa

    name = part.file.name
    try:
        opened = _open(name)
    except Broken as error:
        yield Texts([], [], None, [BadRecord("damaged file", str(error), name)], part.size)
        return
    if (nothing := other_schema(opened.schema, part, config)) is not None:
        yield nothing
        return
    number = part.first
    try:
        for batch in _batches(opened, part):
            yield Texts([], [], size=batch.nbytes)
            for piece in pieces(batch.select(wanted(config)), config):
                yield texts_of(piece, number, config, name, "row", 0)
                number += len(piece)
    except (pa.ArrowInvalid, OSError) as error:
        yield Texts([], [], None, [BadRecord("damaged file", str(error), name, number, "row")])


def _batches(opened: Any, part: Slice) -> Iterator[Any]:
    if part.end < 0:
        yield from opened
        return
    for number in range(part.start, part.end):
        yield opened.get_batch(number)


def _open(name: str) -> Any:
    import pyarrow as pa

    try:
        stream = open_file(name)
        head = stream.read(6)
        stream.seek(0)
        return pa.ipc.open_file(stream) if head == b"ARROW1" else pa.ipc.open_stream(stream)
    except (pa.ArrowInvalid, OSError) as error:
        raise Broken(f"this is not an Arrow file ({error})") from None
