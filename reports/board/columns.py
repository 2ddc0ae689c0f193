"""Parse metrics, signal or evaluation lines into numeric columns.

{"step": 7, "loss": 2.5, "sources": {"web": {"loss": 2.4, "rows": 6}}, …}
    ──► step, loss, loss/web, rows/web, …
{"layers": {"blocks.0": {"weight_norm": 3.1}}, …}
    ──► weight_norm/blocks.0, …
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from ...console.errors import IntegrityError
from ...dataplane.arrays import Float64
from ...dataplane.runlog.writer import decode_line, has_valid_check
from ...trainer.loop.metrics import GROUPS, grouped_metrics

COUNTS = ("rows", "weight")
"""Fields that are 0 for a source without an entry."""
LARGEST = float(np.finfo(np.float32).max)
"""Curve values are float32, and clipped to this."""
NOT_CURVES = ("row", "back_to")
"""Numbers in a line that are not drawn."""


def columns(lines: bytes, file: str) -> tuple[dict[str, Float64], Float64, Float64]:
    """Parse complete lines. Return the columns by name [lines], with NaN for missing numbers, and
    per-line sizes in bytes and checksums [lines]."""
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
        raise IntegrityError(f"{file} has an invalid line: {error}") from None
    if len(table) != len(ends):
        raise IntegrityError(f"{file} has an empty line")
    split_lines = [lines[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if not all(map(has_valid_check, split_lines)):
        raise IntegrityError(f"{file} has a damaged line")
    checksums = [zlib.crc32(line) for line in split_lines]
    return numbers, sizes.astype(np.float64), np.array(checksums, np.float64)


def missing_value(name: str) -> float:
    """Return a curve's value where a line has none."""
    return 0.0 if name.partition("/")[0] in COUNTS else np.nan


def valid_bytes(lines: bytes) -> int:
    """Return the number of bytes before the first invalid line."""
    end = 0
    for line in lines.splitlines(keepends=True):
        if decode_line(line) is None:
            break
        end += len(line)
    return end


def _numbers(table: Any) -> Iterator[tuple[str, Float64]]:
    import pyarrow as pa

    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.combine_chunks()
        if name in GROUPS and pa.types.is_struct(array.type):
            drawn = grouped_metrics(name)
            for member, fields in _fields(array):  # a source, or a layer
                if pa.types.is_struct(fields.type):
                    yield from _member_numbers(member, fields, drawn)
        elif name not in NOT_CURVES and _is_number(array.type):
            yield name, _floats(array)


def _member_numbers(
    member: str, fields: Any, drawn: Collection[str]
) -> Iterator[tuple[str, Float64]]:
    """Yield the drawn numbers of a source or layer, with their values for lines without it."""
    for field, values in _fields(fields):
        if field in drawn and _is_number(values.type):
            numbers = _floats(values)
            yield f"{field}/{member}", np.where(np.isnan(numbers), missing_value(field), numbers)


def _fields(struct: Any) -> Iterator[tuple[str, Any]]:
    """Yield a struct column's fields; where a struct is missing, so are the fields."""
    names = (field.name for field in struct.type)
    return zip(names, struct.flatten(), strict=True)


def _is_number(dtype: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype))


def _floats(values: Any) -> Float64:
    import pyarrow as pa

    numbers = values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values
    floats: Float64 = numbers.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.where(np.isfinite(floats), np.clip(floats, -LARGEST, LARGEST), floats)
