"""The remainder of an epoch: what full chunks leave over, served in the last window.

    spans     ├──────────────────┤  ├───────┤     ├─────────────┤
    rows      ├─ row 0 ─┤┈┈┈┈┈┈┈┈┤  ┈┈┈┈┈┈┈┈┈     ├─ row 1 ─┤┈┈┈┈
    pieces               └─── row 2 ────┘└──── row 3 …

Each span is cut into rows from its start: whole rows, which are numbered first. What is left at
its end is a loose piece, shorter than a row. The loose pieces are laid one after another and cut
into joined rows, so that less than a row remains unserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...arrays import Int64, expand_ranges


@dataclass(frozen=True, eq=False)
class Remainder:
    """Token spans, and the rows of any length that serve them."""

    spans: Int64
    """[n, 2] Token ranges [start, end), sorted."""

    @cached_property
    def tokens(self) -> int:
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def num_rows(self, length: int) -> int:
        return self.tokens // length

    def find_rows(self, length: int, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
        """Find the rows with an input among the tokens [starts[i], ends[i]), for all i.

        Returns pairs, sorted: i, and the row.
        """
        counts = _count_whole_rows(self.spans, length)
        rows_before, num_whole_rows = np.cumsum(counts) - counts, int(counts.sum())
        owners, spans = _find_overlapping(self.spans, starts, ends)
        low = np.maximum(starts[owners] - self.spans[spans, 0], 0) // length
        high = -(-(ends[owners] - self.spans[spans, 0]) // length)
        whole, rows = expand_ranges(
            rows_before[spans] + np.minimum(low, counts[spans]),
            rows_before[spans] + np.minimum(high, counts[spans]),
        )
        whole_owners = owners[whole]
        loose, offsets = _loose_pieces(self.spans, length)
        owners, pieces = _find_overlapping(loose, starts, ends)
        piece_starts, piece_ends = loose[pieces].T
        low = offsets[pieces] + np.maximum(starts[owners] - piece_starts, 0)
        high = offsets[pieces] + np.minimum(ends[owners], piece_ends) - piece_starts
        num_joined_rows = self.num_rows(length) - num_whole_rows
        joined, joined_rows = expand_ranges(
            low // length, np.minimum(-(-high // length), num_joined_rows)
        )
        pairs = np.stack(
            [
                np.concatenate([whole_owners, owners[joined]]),
                np.concatenate([rows, num_whole_rows + joined_rows]),
            ]
        )
        owners, rows = np.unique(pairs, axis=1)  # two pieces of a token range in one joined row
        return owners, rows

    def unserved_spans(self, length: int) -> Int64:
        """Return the token spans [n, 2] that no row serves, in total shorter than a row."""
        pieces, offsets = _loose_pieces(self.spans, length)
        if not len(pieces):
            return pieces
        num_tokens = int(offsets[-1] + pieces[-1, 1] - pieces[-1, 0])
        return _slice_spans(pieces, offsets, num_tokens // length * length, num_tokens)


def locate_rows(
    remainders: Sequence[Remainder], length: int, owners: Int64, rows: Int64
) -> tuple[Int64, dict[int, Int64]]:
    """Locate row rows[i] of the remainder remainders[owners[i]], for all i.

    Returns the first token by i; and for rows with several spans, their spans [n, 2] by i.
    """
    spans = np.concatenate([remainder.spans for remainder in remainders])
    bounds = np.cumsum([0, *(len(remainder.spans) for remainder in remainders)])
    counts = _count_whole_rows(spans, length)
    end_rows = np.cumsum(counts)
    rows_before = np.append(0, end_rows)[bounds]  # whole rows before each remainder, and in all
    first_tokens = np.empty(len(rows), np.int64)
    # The whole rows of all remainders are numbered through.
    numbers = rows_before[owners] + rows
    is_whole = numbers < rows_before[owners + 1]
    span_ids = np.searchsorted(end_rows, numbers[is_whole], side="right")
    row_in_span = numbers[is_whole] - (end_rows[span_ids] - counts[span_ids])
    first_tokens[is_whole] = spans[span_ids, 0] + row_in_span * length
    spans_by_index = {}
    joined = np.flatnonzero(~is_whole)
    if len(joined):
        pieces, offsets = _loose_pieces(spans, length)
        piece_tokens = spans[:, 1] - spans[:, 0] - counts * length
        tokens_before = np.append(0, np.cumsum(piece_tokens))[bounds]
        joined_rows = numbers[joined] - rows_before[owners[joined] + 1]
        starts = tokens_before[owners[joined]] + joined_rows * length
        for index, start in zip(joined.tolist(), starts.tolist(), strict=True):
            spans_by_index[index] = _slice_spans(pieces, offsets, start, start + length)
            first_tokens[index] = spans_by_index[index][0, 0]
    return first_tokens, spans_by_index


def _count_whole_rows(spans: Int64, length: int) -> Int64:
    """Count the rows within each span."""
    counts: Int64 = (spans[:, 1] - spans[:, 0]) // length
    return counts


def _find_overlapping(spans: Int64, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """Find the sorted spans with a token in [starts[i], ends[i]); returns i and the span's index,
    in pairs."""
    first = np.searchsorted(spans[:, 1], starts, side="right")
    end = np.searchsorted(spans[:, 0], ends, side="left")
    return expand_ranges(first, np.where(starts < ends, end, 0))


def _loose_pieces(spans: Int64, length: int) -> tuple[Int64, Int64]:
    """Return the loose pieces [n, 2], and each one's offset [n] when they are laid one after
    another."""
    pieces = spans.copy()
    pieces[:, 0] += _count_whole_rows(spans, length) * length
    pieces = pieces[pieces[:, 0] < pieces[:, 1]]
    sizes = pieces[:, 1] - pieces[:, 0]
    return pieces, np.cumsum(sizes) - sizes


def _slice_spans(spans: Int64, offsets: Int64, start: int, end: int) -> Int64:
    """Slice [start, end) out of spans that are laid one after another, each at its offset."""
    first = int(np.searchsorted(offsets, start, side="right")) - 1
    stop = int(np.searchsorted(offsets, end))
    sliced = spans[first:stop].copy()
    if len(sliced):
        sliced[0, 0] += start - offsets[first]
        sliced[-1, 1] = spans[stop - 1, 0] + end - offsets[stop - 1]
    return sliced[sliced[:, 0] < sliced[:, 1]]


def merge_spans(spans: Int64) -> Int64:
    """Sort spans [start, end) and merge those that touch."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    breaks = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
    starts = spans[np.concatenate([[0], breaks]), 0] if len(spans) else spans[:, 0]
    ends = spans[np.concatenate([breaks - 1, [-1]]), 1] if len(spans) else spans[:, 1]
    return np.stack([starts, ends], axis=1)
