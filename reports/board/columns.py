"""Columns of the numbers in lines of metrics, signals or evaluations.

{"step": 7, "loss": 2.5, "sources": {"web": {"loss": 2.4, "rows": 6}}, …}
    ──► step, loss, loss/web, rows/web, …
{"layers": {"blocks.0": {"weight_norm": 3.1}}, …}
    ──► weight_norm/blocks.0, …
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...console.errors import IntegrityError
from ...dataplane.arrays import Float64
from ...dataplane.runlog.writer import entry_of, is_sound
from ...trainer.loop.metrics import GROUPS, fields_of

COUNTS = ("rows", "weight")
"""Fields of which a source without an entry has none: 0."""
LARGEST = float(np.finfo(np.float32).max)
"""Curves are float32: a larger value is shown as this one."""
LEFT_OUT = ("row", "back_to")
"""Numbers of a line that are no curve."""


def columns(lines: bytes, where: str) -> tuple[dict[str, Float64], Float64, Float64]:
    """Return the columns of whole lines, with NaN where a line lacks a number, and for each line
    its size in bytes and its checksum."""
    import pyarrow as pa
    from pyarrow.json import ReadOptions, read_json

    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == ord("\n")) + 1
    sizes = np.diff(ends, prepend=0)
    try:
        table = read_json(
            io.BytesIO(lines),
            read_options=ReadOptions(use_threads=False, block_size=len(lines) + 1),
        )
        numbers = dict(_numbers(table))
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise IntegrityError(f"{where} has an invalid line: {error}") from None
    if len(table) != len(ends):
        raise IntegrityError(f"{where} has an empty line")
    parts = [lines[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if not all(map(is_sound, parts)):
        raise IntegrityError(f"{where} has a damaged line")
    sums = [zlib.crc32(line) for line in parts]
    return numbers, sizes.astype(np.float64), np.array(sums, np.float64)


def missing_value(name: str) -> float:
    """Return the value of a curve in a line without one."""
    return 0.0 if name.partition("/")[0] in COUNTS else np.nan


def valid_bytes(lines: bytes) -> int:
    """Return the number of bytes before the first line that is no whole entry."""
    end = 0
    for line in lines.splitlines(keepends=True):
        if entry_of(line) is None:
            break
        end += len(line)
    return end


def _numbers(table: Any) -> Iterator[tuple[str, Float64]]:
    import pyarrow as pa

    for name, column in zip(table.column_names, table.columns, strict=True):
        whole = column.combine_chunks()
        if name in GROUPS and pa.types.is_struct(whole.type):
            drawn = fields_of(name)
            for part, fields in _fields(whole):
                if pa.types.is_struct(fields.type):
                    for field, values in _fields(fields):
                        if field in drawn and _is_number(values.type):
                            numbers, missing = _floats(values), missing_value(field)
                            yield (
                                f"{field}/{part}",
                                np.where(np.isnan(numbers), missing, numbers),
                            )
        elif name not in LEFT_OUT and _is_number(whole.type):
            yield name, _floats(whole)


def _fields(struct: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a column of objects; a missing object has missing fields."""
    names = (field.name for field in struct.type)
    return zip(names, struct.flatten(), strict=True)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _floats(values: Any) -> Float64:
    import pyarrow as pa

    numbers = values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values
    found: Float64 = numbers.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.where(np.isfinite(found), np.clip(found, -LARGEST, LARGEST), found)
