"""Spans of tokens in memory for a long time, in about two bytes each.

The edges of the spans that a cut has left are multiples of the row length apart, and most of them a
few rows. A step from one edge to the next is a byte, in rows; other steps are kept beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...arrays import Int64

STEPS = 255
"""Greatest step of a byte, in rows."""


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """Spans [start, end)."""

    length: int
    """Tokens of a row."""
    steps: npt.NDArray[np.uint8]
    """From edge to edge, in rows; 0: one of `others`."""
    others: Int64
    """In tokens."""

    @classmethod
    def of(cls, spans: Int64, length: int) -> Packed:
        steps = np.diff(spans.ravel(), prepend=0)
        rows, beyond = np.divmod(steps, length)
        other = (beyond != 0) | (rows < 1) | (rows > STEPS)
        return cls(length, np.where(other, 0, rows).astype(np.uint8), steps[other])

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + self.others.nbytes

    def spans(self) -> Int64:
        steps = self.steps.astype(np.int64) * self.length
        steps[self.steps == 0] = self.others
        spans: Int64 = np.cumsum(steps).reshape(-1, 2)
        return spans
