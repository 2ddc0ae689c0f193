"""The loss weights of rows' targets, from the weight codes that shards store.

Most tokens have code 0, and padding is known without bytes. So every row first has the weight of
code 0; then padding is filled; and only rows with other codes are looked up token by token, which
costs more than the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Int64

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RowWeights:
    """The weight codes of rows of equal length."""

    length: int
    """Tokens of a row, the last target included."""
    tables: list[Float32]
    """The weight of each code; the last is that of padding, where there is padding."""
    kinds: Int64
    """The place of each row's table among `tables`."""
    codes: Bytes | None
    """[rows, length]: the code of each token, 0 in padding; None if all are 0."""
    padding: Int64
    """[paddings, 2]: places [low, high) in the rows laid side by side."""

    def write(self, out: Float32) -> None:
        """Write the weight of each target into an array [rows, length - 1]."""
        firsts, lasts = (np.array([table[end] for table in self.tables]) for end in (0, -1))
        out[:] = firsts[self.kinds][:, None]
        if self.codes is not None:
            codes = self.codes[:, 1:]
            coded = codes.any(axis=1)
            for kind, table in enumerate(self.tables):
                chosen = np.flatnonzero(coded & (self.kinds == kind))
                out[chosen] = table[codes[chosen]]
        # A row's first token is no target.
        rows = self.padding[:, 0] // self.length
        lows, highs = (self.padding - rows[:, None] - 1).T
        lows = np.maximum(lows, rows * (self.length - 1))
        flat = out.reshape(-1)
        for low, high, weight in zip(
            lows.tolist(), highs.tolist(), lasts[self.kinds[rows]].tolist(), strict=True
        ):
            flat[low:high] = weight
