"""The remainder of an epoch: the tokens that no window of whole chunks serves.

    spans     ├──────────────────┤  ├───────┤     ├─────────────┤
    rows      ├─ row 0 ─┤┈┈┈┈┈┈┈┈┤  ┈┈┈┈┈┈┈┈┈     ├─ row 1 ─┤┈┈┈┈
    pieces               └─── row 2 ────┘└──── row 3 …

Each span is cut into rows from its start. The pieces that are left, all shorter than a row, are
laid one after another and cut into more rows, so that less than a row of the remainder is in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...arrays import Int64


@dataclass(frozen=True, eq=False)
class Remainder:
    """Spans of tokens, and their rows of any length."""

    spans: Int64
    """[start, end) of each, in order."""

    @cached_property
    def tokens(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def rows(self, length: int) -> int:
        """Return the number of rows."""
        return self.tokens // length

    def rows_with(self, length: int, start: int, end: int) -> Int64:
        """Return the rows with an input among the tokens [start, end)."""
        counts = _whole(self.spans, length)
        before = np.cumsum(counts) - counts
        found = [np.empty(0, np.int64)]
        for span in np.flatnonzero((self.spans[:, 0] < end) & (self.spans[:, 1] > start)).tolist():
            first = int(self.spans[span, 0])
            low, high = max(start - first, 0) // length, -(-(end - first) // length)
            low, high = min(low, int(counts[span])), min(high, int(counts[span]))
            found.append(before[span] + np.arange(low, high))
        loose, starts = _loose(self.spans, length)
        for piece in np.flatnonzero((loose[:, 0] < end) & (loose[:, 1] > start)).tolist():
            low = int(starts[piece]) + max(start - int(loose[piece, 0]), 0)
            high = int(starts[piece]) + min(end, int(loose[piece, 1])) - int(loose[piece, 0])
            joined_rows = np.arange(low // length, -(-high // length)) + int(counts.sum())
            found.append(joined_rows[joined_rows < self.rows(length)])
        return np.unique(np.concatenate(found))

    def unused(self, length: int) -> Int64:
        """Return the spans that are in no row, shorter than a row together."""
        loose, starts = _loose(self.spans, length)
        if not len(loose):
            return loose
        end = int(starts[-1] + loose[-1, 1] - loose[-1, 0])
        return _cut(loose, starts, end // length * length, end)


def locate(
    remainders: Sequence[Remainder], length: int, owners: Int64, rows: Int64
) -> tuple[Int64, dict[int, Int64]]:
    """Return the first token of each row, and the spans of the rows that have several. `owners` are
    the places of the rows' remainders among all."""
    spans = np.concatenate([remainder.spans for remainder in remainders])
    edges = np.cumsum([0, *(len(remainder.spans) for remainder in remainders)])
    counts = _whole(spans, length)
    ends = np.cumsum(counts)
    before = np.append(0, ends)[edges]  # rows within the spans before each remainder
    first = np.empty(len(rows), np.int64)
    numbers = before[owners] + rows
    in_span = numbers < before[owners + 1]
    whole = numbers[in_span]
    span = np.searchsorted(ends, whole, side="right")
    first[in_span] = spans[span, 0] + (whole - ends[span] + counts[span]) * length
    pieces = {}
    at = np.flatnonzero(~in_span)
    if len(at):
        loose, starts = _loose(spans, length)
        size = spans[:, 1] - spans[:, 0] - counts * length
        before_loose = np.append(0, np.cumsum(size))[edges]
        begin = before_loose[owners[at]] + (numbers[at] - before[owners[at] + 1]) * length
        for place, low in zip(at.tolist(), begin.tolist(), strict=True):
            pieces[place] = _cut(loose, starts, low, low + length)
            first[place] = pieces[place][0, 0]
    return first, pieces


def _whole(spans: Int64, length: int) -> Int64:
    """Return the number of rows that lie within each span."""
    counts: Int64 = (spans[:, 1] - spans[:, 0]) // length
    return counts


def _loose(spans: Int64, length: int) -> tuple[Int64, Int64]:
    """Return the pieces after the rows of each span, and the number of tokens before each."""
    loose = spans.copy()
    loose[:, 0] += _whole(spans, length) * length
    loose = loose[loose[:, 0] < loose[:, 1]]
    sizes = loose[:, 1] - loose[:, 0]
    return loose, np.cumsum(sizes) - sizes


def _cut(spans: Int64, starts: Int64, first: int, last: int) -> Int64:
    """Return the part [first, last) of spans that are laid one after another at `starts`."""
    low = int(np.searchsorted(starts, first, side="right")) - 1
    high = int(np.searchsorted(starts, last))
    part = spans[low:high].copy()
    if len(part):
        part[0, 0] += first - starts[low]
        part[-1, 1] = spans[high - 1, 0] + last - starts[high - 1]
    return part[part[:, 0] < part[:, 1]]


def joined(spans: Int64) -> Int64:
    """Sort spans [start, end) and merge those that touch."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    apart = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
    starts = spans[np.concatenate([[0], apart]), 0] if len(spans) else spans[:, 0]
    ends = spans[np.concatenate([apart - 1, [-1]]), 1] if len(spans) else spans[:, 1]
    return np.stack([starts, ends], axis=1)
