"""Rows as shards store them, gathered in a single array.

A numpy call per row costs more than the row's bytes. So rows are gathered by untyped memory copies,
and then a single call widens all ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from ..arrays import Bytes, Int64
from ..runlog.ledger import DIGEST_BYTES


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows with equal length, and possibly different id types."""

    memory: Bytes
    """[rows, bytes]; a narrow type leaves the end unused."""
    length: int
    """Tokens per row, the last target included."""
    dtypes: list[np.dtype[Any]]
    dtype_ids: Int64
    """[rows] Index into `dtypes`."""

    def widen(self, out: Int64) -> None:
        """Copy the tokens into `out` [rows, length]."""
        for dtype_id, dtype in enumerate(self.dtypes):
            rows = slice(None) if len(self.dtypes) == 1 else self.dtype_ids == dtype_id
            out[rows] = self.memory[rows, : self.length * dtype.itemsize].view(dtype)

    def digests(self) -> list[bytes]:
        """Return a digest per row, over the stored tokens."""
        data, row_bytes = self.memory.reshape(-1).data, self.memory.shape[1]
        sizes = np.array([dtype.itemsize * self.length for dtype in self.dtypes], np.int64)
        return [
            blake2b(
                data[row_bytes * row : row_bytes * row + size], digest_size=DIGEST_BYTES
            ).digest()
            for row, size in enumerate(sizes[self.dtype_ids].tolist())
        ]
