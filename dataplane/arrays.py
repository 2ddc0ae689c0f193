"""Array types of the data plane, and Arrow arrays of them.

`pyarrow.array` imports pandas, if it is installed, which takes longer than a small build.
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


def arrow_numbers(values: npt.NDArray[Any]) -> Any:
    """Return numbers as an Arrow array that shares their memory."""
    import pyarrow as pa

    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def arrow_column(values: Sequence[int | str | bytes | None], kind: Any) -> Any:
    """Return integers, texts or bytes as an Arrow array of the type `kind`."""
    import pyarrow as pa

    valid = np.array([value is not None for value in values], np.bool_)
    buffers: list[Any]
    if pa.types.is_integer(kind):
        buffers = [np.array([value or 0 for value in values], np.dtype(str(kind)))]
    else:
        parts: list[Any] = [v.encode() if isinstance(v, str) else v or b"" for v in values]
        ends = np.cumsum([0, *(len(part) for part in parts)])
        if ends[-1] > np.iinfo(np.int32).max:
            raise pa.ArrowCapacityError("a column of an Arrow file is limited to 2 GiB of text")
        buffers = [ends.astype(np.int32), b"".join(parts)]
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [bits, *map(pa.py_buffer, buffers)])
