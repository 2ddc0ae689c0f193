"""MDS files of other programs: the type of their ids, and where each sample holds them.

A column `ndarray` records the type and the shape of its values in every sample, `ndarray:TYPE` the
shape alone, and `bytes` neither. Every sample is compared with the type that its file is read with.
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
"""First byte of a sample of a column `ndarray`."""


def external_layout(
    read: Reader, offsets: Int64, config: dict[str, Any], dtype: str, column: str
) -> ShardLayout:
    """Return the layout of a file from the sizes in each sample."""
    names = config["column_names"]
    if column not in names:
        raise InputError(
            f"the MDS file has no column `{column}`", hint=f"its columns: {', '.join(names)}"
        )
    encoding, width = config["column_encodings"][names.index(column)], np.dtype(dtype).itemsize
    byte_offsets, lengths = [], []
    for number, (start, end) in enumerate(pairwise(offsets.tolist())):
        sample = read(start, end)
        low, high = places(sample, config)[column]
        try:
            head = _head_bytes(sample[low:high], encoding, dtype)
        except InputError as error:
            raise InputError(f"sample {number}, column `{column}`: {error.message}") from None
        byte_offsets.append(start + low + head)
        lengths.append((high - low - head) // width)
    starts = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
    return ShardLayout(starts, starts, np.array(byte_offsets, np.int64))


def id_type(
    entry: dict[str, Any], column: str, dtype: str | None, first_value: Callable[[], bytes]
) -> str:
    """Return the type of the ids of a shard in index.json: the recorded one, or else `dtype`.
    `first_value` returns the column of the shard's first sample, empty if it has none."""
    names = entry["column_names"]
    if column not in names:
        raise InputError(
            f"the MDS shards have no column `{column}`",
            hint=f"choose one with --column: {', '.join(names)}",
        )
    encoding = entry["column_encodings"][names.index(column)]
    kind, recorded = (*encoding.split(":"), "")[:2]
    if encoding == "ndarray":
        recorded = "".join(TYPES.get(code, "") for code in first_value()[:1])
    if recorded and dtype not in (None, recorded):
        raise MisuseError(
            f"the column `{column}` records the type of its ids: {recorded}, not {dtype}",
            hint="remove --dtype",
        )
    if kind not in ("ndarray", "bytes") or not (recorded or dtype):
        raise InputError(
            f"the column `{column}` is encoded as `{encoding}`, which does not record the type of "
            "its ids",
            hint="give it with --dtype, for example --dtype uint16",
        )
    return recorded or str(dtype)


def places(sample: bytes, config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the range of each column in a sample."""
    variable = config["column_sizes"].count(None)
    sizes = iter(np.frombuffer(sample[: 4 * variable], np.uint32).tolist())
    ranges, at = {}, 4 * variable
    for name, fixed in zip(config["column_names"], config["column_sizes"], strict=True):
        size = fixed or next(sizes)
        ranges[name] = (at, at + size)
        at += size
    return ranges


def _head_bytes(value: bytes, encoding: str, dtype: str) -> int:
    """Return the bytes before the ids of a value; raise if it does not hold ids of this type."""
    kind, *static = encoding.split(":")
    head, count = 0, None
    if kind == "ndarray" and not static:
        recorded = TYPES.get(value[0], "an unknown type") if value else "nothing"
        if recorded != dtype:
            raise InputError(f"it holds {recorded}, but the dataset's ids are {dtype}")
        head = 1
    if kind == "ndarray" and len(static) < 2:
        dimensions, width = value[head] >> 2, 1 << value[head] % 4
        shape = [
            int.from_bytes(value[head + 1 + k * width : head + 1 + (k + 1) * width], "little")
            for k in range(dimensions)
        ]
        head, count = head + 1 + dimensions * width, math.prod(shape)
    size = len(value) - head
    if size % np.dtype(dtype).itemsize or count not in (None, size // np.dtype(dtype).itemsize):
        whole = "a whole number of" if count is None else f"{count:,}"
        raise InputError(f"its {size:,} bytes are not {whole} {dtype} ids")
    return head
