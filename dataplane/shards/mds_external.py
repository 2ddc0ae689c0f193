"""MDS files by other programs: id types, and where samples hold ids.

A column `ndarray` records type and shape in every sample, `ndarray:TYPE` the shape alone, and
`bytes` neither. Every sample is compared with the dataset's id type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from ...console.errors import InputError, MisuseError
from ..arrays import Int64
from .format import Reader, ShardLayout

TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"}
TYPES |= {33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"}
"""Type by the first byte in an `ndarray` value."""


def external_layout(
    read: Reader, offsets: Int64, config: dict[str, Any], dtype: str, column: str
) -> ShardLayout:
    """Return a file's layout, from the sizes in every sample."""
    columns = config["column_names"]
    if column not in columns:
        raise InputError(
            f"the MDS file has no column `{column}`", hint=f"its columns: {', '.join(columns)}"
        )
    encoding, width = config["column_encodings"][columns.index(column)], np.dtype(dtype).itemsize
    byte_offsets, lengths = [], []
    for number, (start, end) in enumerate(pairwise(offsets.tolist())):
        sample = read(start, end)
        value_start, value_end = column_ranges(sample, config)[column]
        try:
            header_bytes = _header_bytes(sample[value_start:value_end], encoding, dtype)
        except InputError as error:
            raise InputError(f"sample {number}, column `{column}`: {error.message}") from None
        byte_offsets.append(start + value_start + header_bytes)
        lengths.append((value_end - value_start - header_bytes) // width)
    document_starts = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
    return ShardLayout(document_starts, document_starts, np.array(byte_offsets, np.int64))


def recorded_id_type(
    entry: dict[str, Any], column: str, dtype: str | None, first_value: Callable[[], bytes]
) -> str:
    """Return the id type for a shard in index.json: as recorded, or else `dtype`. `first_value`
    returns the column's value in the first sample, empty if there is none."""
    columns = entry["column_names"]
    if column not in columns:
        raise InputError(
            f"the MDS shards have no column `{column}`",
            hint=f"name the column of ids with --column: {', '.join(columns)}",
        )
    encoding = entry["column_encodings"][columns.index(column)]
    encoding_kind, recorded = (*encoding.split(":"), "")[:2]
    if encoding == "ndarray":
        recorded = "".join(TYPES.get(code, "") for code in first_value()[:1])
    if recorded and dtype not in (None, recorded):
        raise MisuseError(
            f"the column `{column}` records the type of its ids: {recorded}, not {dtype}",
            hint="remove --dtype",
        )
    if encoding_kind not in ("ndarray", "bytes"):
        raise InputError(
            f"the column `{column}` is encoded as `{encoding}`: it holds no arrays of ids",
            hint="name a column of ids with --column; `tokenize build` reads text from JSON lines "
            "or Parquet, not from MDS",
        )
    if not (recorded or dtype):
        raise InputError(
            f"the column `{column}` is encoded as `{encoding}`, which does not record the type of "
            "its ids",
            hint="give the type that its writer used with --dtype (llm-foundry: --dtype int64)",
        )
    return recorded or str(dtype)


def column_ranges(sample: bytes, config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return byte ranges [start, end) in a sample, by column."""
    num_variable = config["column_sizes"].count(None)
    sizes = iter(np.frombuffer(sample[: 4 * num_variable], np.uint32).tolist())
    ranges, offset = {}, 4 * num_variable
    for column, fixed_size in zip(config["column_names"], config["column_sizes"], strict=True):
        size = fixed_size or next(sizes)
        ranges[column] = (offset, offset + size)
        offset += size
    return ranges


def _header_bytes(value: bytes, encoding: str, dtype: str) -> int:
    """Return the number of bytes before the ids; raise if the ids are not `dtype`."""
    encoding_kind, *type_and_shape = encoding.split(":")
    header_bytes, num_ids = 0, None
    if encoding_kind == "ndarray" and not type_and_shape:
        value_type = TYPES.get(value[0], "an unknown type") if value else "nothing"
        if value_type != dtype:
            raise InputError(f"it holds {value_type}, but the dataset's ids are {dtype}")
        header_bytes = 1
    if encoding_kind == "ndarray" and len(type_and_shape) < 2:
        num_dimensions, width = value[header_bytes] >> 2, 1 << value[header_bytes] % 4
        start = header_bytes + 1
        header_bytes = start + num_dimensions * width
        shape = [
            int.from_bytes(value[offset : offset + width], "little")
            for offset in range(start, header_bytes, width)
        ]
        num_ids = math.prod(shape)
    id_bytes = len(value) - header_bytes
    itemsize = np.dtype(dtype).itemsize
    if id_bytes % itemsize or num_ids not in (None, id_bytes // itemsize):
        expected = "a whole number of" if num_ids is None else f"{num_ids:,}"
        raise InputError(f"its {id_bytes:,} bytes are not {expected} {dtype} ids")
    return header_bytes
