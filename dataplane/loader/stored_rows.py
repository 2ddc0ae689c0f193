"""The tokens of rows as shards store them, gathered in one place.

A call of numpy for each row costs more than the row's bytes. So rows are gathered by copies of
memory, which know nothing of types; then one call widens all of them.
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
    """Rows of equal length."""

    memory: Bytes
    """[rows, bytes]: a row of a narrow type does not fill its place."""
    length: int
    """Tokens of a row, the last target included."""
    dtypes: list[np.dtype[Any]]
    kinds: Int64
    """The place of each row's type among `dtypes`."""

    def widen(self, out: Int64) -> None:
        """Copy the tokens into an array [rows, length]."""
        for kind, dtype in enumerate(self.dtypes):
            chosen = slice(None) if len(self.dtypes) == 1 else self.kinds == kind
            out[chosen] = self.memory[chosen, : self.length * dtype.itemsize].view(dtype)

    def digests(self) -> list[bytes]:
        """Return the digest of each row's tokens."""
        data, place = self.memory.reshape(-1).data, self.memory.shape[1]
        sizes = np.array([dtype.itemsize * self.length for dtype in self.dtypes], np.int64)
        return [
            blake2b(data[place * row : place * row + size], digest_size=DIGEST_BYTES).digest()
            for row, size in enumerate(sizes[self.kinds].tolist())
        ]
