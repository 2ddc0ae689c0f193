"""Array types in the data plane, and conversion to Arrow.

`pyarrow.array` imports pandas, if installed, which takes longer than a small build.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
"""Token ids as shards store them."""
TOO_MUCH_TEXT = "a column of an Arrow file is limited to 2 GiB of text"


def arrow_numbers(values: npt.NDArray[Any]) -> Any:
    """Convert numbers to an Arrow array, sharing memory."""
    import pyarrow as pa

    arrow_type = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(values)])


def arrow_column(values: Sequence[int | str | bytes | None], arrow_type: Any) -> Any:
    """Convert integers, texts or bytes to an Arrow array."""
    import pyarrow as pa

    is_valid = np.array([value is not None for value in values], np.bool_)
    buffers: list[Any]
    if pa.types.is_integer(arrow_type):
        buffers = [np.array([value or 0 for value in values], np.dtype(str(arrow_type)))]
    else:
        encoded: list[Any] = [
            value.encode() if isinstance(value, str) else value or b"" for value in values
        ]
        offsets = np.cumsum([0, *(len(value) for value in encoded)])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise pa.ArrowCapacityError(TOO_MUCH_TEXT)
        buffers = [offsets.astype(np.int32), b"".join(encoded)]
    validity = None if is_valid.all() else pa.py_buffer(np.packbits(is_valid, bitorder="little"))
    return pa.Array.from_buffers(arrow_type, len(values), [validity, *map(pa.py_buffer, buffers)])


def arrow_texts(texts: Sequence[str], numbers: Int32) -> Any:
    """Convert the texts at these indices to an Arrow array."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in encoded], np.int64)[numbers]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise pa.ArrowCapacityError(TOO_MUCH_TEXT)
    data = b"".join(map(encoded.__getitem__, numbers.tolist()))
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(numbers), buffers)


def arrow_null_texts(count: int) -> Any:
    """Return an Arrow array of texts that are null."""
    import pyarrow as pa

    buffers = [bytes(-(-count // 8)), np.zeros(count + 1, np.int32), b""]
    return pa.Array.from_buffers(pa.string(), count, list(map(pa.py_buffer, buffers)))


def count_byte(data: bytes | memoryview, byte: bytes) -> int:
    """Count a byte by vector instructions, which `bytes.count` does not use."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == byte[0]))


def expand_ranges(firsts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """List the numbers of the ranges [firsts[i], ends[i]): i, and the number, in pairs."""
    counts = np.maximum(ends - firsts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    offsets = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    return owners, firsts[owners] + offsets
