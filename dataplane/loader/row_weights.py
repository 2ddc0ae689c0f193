"""Loss weights for row targets, from the weight codes in shards.

Most tokens have code 0, and padding is known without bytes. So rows are first filled with the
weight for code 0, then padding is written. Only rows with further codes are looked up token by
token, which costs the most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Int64

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RowWeights:
    """Weight codes for rows with equal length."""

    length: int
    """Tokens per row, the last target included."""
    tables: list[Float32]
    """Weights by code; with padding, the last weight is for padding."""
    table_ids: Int64
    """[rows] Index into `tables`."""
    codes: Bytes | None
    """[rows, length] Codes, 0 in padding; None if all are 0."""
    padding: Int64
    """[paddings, 2] Token ranges [start, end) in the rows laid side by side."""

    def write(self, out: Float32) -> None:
        """Write target weights into `out` [rows, length - 1]."""
        default_weights, padding_weights = (
            np.array([table[index] for table in self.tables]) for index in (0, -1)
        )
        out[:] = default_weights[self.table_ids][:, None]
        if self.codes is not None:
            codes = self.codes[:, 1:]
            has_codes = codes.any(axis=1)
            for table_id, table in enumerate(self.tables):
                table_rows = np.flatnonzero(has_codes & (self.table_ids == table_id))
                out[table_rows] = table[codes[table_rows]]
        # A row's first token is no target.
        rows = self.padding[:, 0] // self.length
        starts, ends = (self.padding - rows[:, None] - 1).T
        starts = np.maximum(starts, rows * (self.length - 1))
        flat = out.reshape(-1)
        for start, end, weight in zip(
            starts.tolist(),
            ends.tolist(),
            padding_weights[self.table_ids[rows]].tolist(),
            strict=True,
        ):
            flat[start:end] = weight
