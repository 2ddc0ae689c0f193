"""The remainder of an epoch: the tokens that no window of full chunks serves.

    spans     ├──────────────────┤  ├───────┤     ├─────────────┤
    rows      ├─ row 0 ─┤┈┈┈┈┈┈┈┈┤  ┈┈┈┈┈┈┈┈┈     ├─ row 1 ─┤┈┈┈┈
    pieces               └─── row 2 ────┘└──── row 3 …

Each span is cut into rows from its start. The loose pieces, all shorter than a row, are laid one
after another and cut into further rows, so that less than a row remains unserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...arrays import Int64


@dataclass(frozen=True, eq=False)
class Remainder:
    """Token spans, and their rows of any length."""

    spans: Int64
    """[n, 2]: start and end, sorted."""

    @cached_property
    def tokens(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def num_rows(self, length: int) -> int:
        return self.tokens // length

    def find_rows(self, length: int, start: int, end: int) -> Int64:
        """Find the rows with an input among the tokens [start, end)."""
        counts = _count_rows(self.spans, length)
        rows_before = np.cumsum(counts) - counts
        rows = [np.empty(0, np.int64)]
        for span in np.flatnonzero((self.spans[:, 0] < end) & (self.spans[:, 1] > start)).tolist():
            first = int(self.spans[span, 0])
            low, high = max(start - first, 0) // length, -(-(end - first) // length)
            low, high = min(low, int(counts[span])), min(high, int(counts[span]))
            rows.append(rows_before[span] + np.arange(low, high))
        pieces, offsets = _loose_pieces(self.spans, length)
        for piece in np.flatnonzero((pieces[:, 0] < end) & (pieces[:, 1] > start)).tolist():
            low = int(offsets[piece]) + max(start - int(pieces[piece, 0]), 0)
            high = int(offsets[piece]) + min(end, int(pieces[piece, 1])) - int(pieces[piece, 0])
            joined_rows = np.arange(low // length, -(-high // length)) + int(counts.sum())
            rows.append(joined_rows[joined_rows < self.num_rows(length)])
        return np.unique(np.concatenate(rows))

    def unserved_spans(self, length: int) -> Int64:
        """Return the spans that are in no row, in total shorter than a row."""
        pieces, offsets = _loose_pieces(self.spans, length)
        if not len(pieces):
            return pieces
        end = int(offsets[-1] + pieces[-1, 1] - pieces[-1, 0])
        return _slice_spans(pieces, offsets, end // length * length, end)


def locate_rows(
    remainders: Sequence[Remainder], length: int, owners: Int64, rows: Int64
) -> tuple[Int64, dict[int, Int64]]:
    """Locate rows[i] of remainder owners[i].

    Returns the first token by row; and for rows with several spans, their spans by index.
    """
    spans = np.concatenate([remainder.spans for remainder in remainders])
    edges = np.cumsum([0, *(len(remainder.spans) for remainder in remainders)])
    counts = _count_rows(spans, length)
    end_rows = np.cumsum(counts)
    rows_before = np.append(0, end_rows)[edges]  # rows within spans, before each remainder
    first_tokens = np.empty(len(rows), np.int64)
    numbers = rows_before[owners] + rows
    in_span = numbers < rows_before[owners + 1]
    span = np.searchsorted(end_rows, numbers[in_span], side="right")
    row_in_span = numbers[in_span] - end_rows[span] + counts[span]
    first_tokens[in_span] = spans[span, 0] + row_in_span * length
    spans_by_row = {}
    joined = np.flatnonzero(~in_span)
    if len(joined):
        pieces, offsets = _loose_pieces(spans, length)
        piece_tokens = spans[:, 1] - spans[:, 0] - counts * length
        tokens_before = np.append(0, np.cumsum(piece_tokens))[edges]
        row_in_pieces = numbers[joined] - rows_before[owners[joined] + 1]
        starts = tokens_before[owners[joined]] + row_in_pieces * length
        for row, start in zip(joined.tolist(), starts.tolist(), strict=True):
            spans_by_row[row] = _slice_spans(pieces, offsets, start, start + length)
            first_tokens[row] = spans_by_row[row][0, 0]
    return first_tokens, spans_by_row


def _count_rows(spans: Int64, length: int) -> Int64:
    """Count the rows within each span."""
    counts: Int64 = (spans[:, 1] - spans[:, 0]) // length
    return counts


def _loose_pieces(spans: Int64, length: int) -> tuple[Int64, Int64]:
    """Return the pieces after the rows of each span, and the total tokens before each piece."""
    pieces = spans.copy()
    pieces[:, 0] += _count_rows(spans, length) * length
    pieces = pieces[pieces[:, 0] < pieces[:, 1]]
    sizes = pieces[:, 1] - pieces[:, 0]
    return pieces, np.cumsum(sizes) - sizes


def _slice_spans(spans: Int64, offsets: Int64, start: int, end: int) -> Int64:
    """Slice [start, end) out of spans that lie one after another, each at its offset."""
    low = int(np.searchsorted(offsets, start, side="right")) - 1
    high = int(np.searchsorted(offsets, end))
    sliced = spans[low:high].copy()
    if len(sliced):
        sliced[0, 0] += start - offsets[low]
        sliced[-1, 1] = spans[high - 1, 0] + end - offsets[high - 1]
    return sliced[sliced[:, 0] < sliced[:, 1]]


def merge_spans(spans: Int64) -> Int64:
    """Sort spans [start, end) and merge those that touch."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    breaks = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
    starts = spans[np.concatenate([[0], breaks]), 0] if len(spans) else spans[:, 0]
    ends = spans[np.concatenate([breaks - 1, [-1]]), 1] if len(spans) else spans[:, 1]
    return np.stack([starts, ends], axis=1)
