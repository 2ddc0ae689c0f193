"""Token spans in about two bytes each, for a long time in memory.

Between the edges of spans after a cut lie whole rows, and mostly few. A step from edge to edge is a
byte, in rows; other steps are exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...arrays import Int64

MAX_STEP = 255
"""Maximum step of a byte, in rows."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedSpans:
    """Spans [start, end)."""

    length: int
    """Tokens per row."""
    steps: npt.NDArray[np.uint8]
    """Steps between edges, in rows; 0 stands for the next exception."""
    exceptions: Int64
    """Steps in tokens."""

    @classmethod
    def pack(cls, spans: Int64, length: int) -> PackedSpans:
        steps = np.diff(spans.ravel(), prepend=0)
        rows, extra_tokens = np.divmod(steps, length)
        is_exception = (extra_tokens != 0) | (rows < 1) | (rows > MAX_STEP)
        return cls(length, np.where(is_exception, 0, rows).astype(np.uint8), steps[is_exception])

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + self.exceptions.nbytes

    def unpack(self) -> Int64:
        steps = self.steps.astype(np.int64) * self.length
        steps[self.steps == 0] = self.exceptions
        spans: Int64 = np.cumsum(steps).reshape(-1, 2)
        return spans
