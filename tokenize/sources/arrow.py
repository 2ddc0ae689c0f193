"""Arrow: IPC files (also called Feather 2) and IPC streams; a row a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...console.errors import InputError
from . import File, Problem, Slice, SourceConfig, Texts
from .columns import texts_of
from .streams import open_file

ROWS = 1024


def cut(file: File, config: SourceConfig, size: int) -> list[Slice]:
    opened = _open(file.name)
    if not hasattr(opened, "num_record_batches"):
        return [Slice(file, 0, -1, 0, file.size)]  # a stream has no index
    count = opened.num_record_batches
    step = max(1, count * size // max(1, file.size))
    slices, rows = [], 0
    for start in range(0, count, step):
        end = min(count, start + step)
        slices.append(Slice(file, start, end, rows, file.size * (end - start) // count))
        if end < count:
            rows += sum(opened.get_batch(number).num_rows for number in range(start, end))
    return slices


def read(part: Slice, config: SourceConfig) -> Iterator[Texts]:
    import pyarrow as pa

    name = part.file.name
    opened = _open(name)
    names = opened.schema.names
    wanted = [config.text_field, *([config.id_field] if config.id_field else [])]
    if missing := [column for column in wanted if column not in names]:
        what = f"no column `{missing[0]}` (it has {', '.join(names)})"
        yield Texts([], [], None, [Problem("other schema", what, name)], part.size)
        return
    number = part.first
    try:
        for batch in _batches(opened, part):
            yield Texts([], [], size=batch.nbytes)
            for start in range(0, len(batch), ROWS):
                piece = batch.slice(start, ROWS).select(wanted)
                yield texts_of(piece, number, config, name, "row", 0)
                number += len(piece)
    except (pa.ArrowInvalid, OSError) as error:
        yield Texts([], [], None, [Problem("damaged file", str(error), name, number, "row")])


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
        raise InputError(f"{name} is not an Arrow file: {error}") from None
