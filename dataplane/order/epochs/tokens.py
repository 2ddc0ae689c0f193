"""The tokens of rows, computed for many epochs and sources in one call.

    row → window → slot in the shuffled window → chunk, or remainder → tokens

A numpy call costs as much for one row as for hundreds, and a mixture may have thousands of sources.
So the sizes of epochs are columns, and every step handles all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...arrays import Int64, expand_ranges
from .bounded import BoundedCache
from .epoch import ALL_CHUNKS, Cut, Epoch, Shuffle
from .packed import PackedSpans
from .permutation import UInt64, derive_key, derive_keys, invert, permute
from .remainder import Remainder, locate_rows, merge_spans

REMAINDERS_BYTES = 8 << 20
"""Budget for cached remainders of cut epochs. Everything else is computed quickly."""
MAX_SPANS = 1 << 12
"""Spans searched together in remainders: larger arrays leave a core's cache."""

REMAINDERS: BoundedCache[tuple[Shuffle, int, tuple[Cut, ...]], PackedSpans] = BoundedCache(
    REMAINDERS_BYTES
)
"""Remainders by source, epoch and cuts."""


class Epochs:
    """A table of epochs, in rows with one length."""

    def __init__(self, epochs: Sequence[Epoch], length: int) -> None:
        self.epochs, self.length = epochs, length
        columns = [
            (
                epoch.chunk,
                epoch.pool.num_chunks,
                epoch.window_rows(length),
                epoch.chunks_before_last_window * (epoch.chunk // length),
                epoch.last_window,
                epoch.end_row(length),
                epoch.shuffle.direction,
            )
            for epoch in epochs
        ]
        (
            self.chunk,  # tokens
            self.num_chunks,
            self.window_rows,  # but for the last window
            self.last_window_start,
            self.last_window,
            self.end_row,
            self.direction,
        ) = np.array(columns, np.int64).reshape(-1, 7).T
        self.starts = [
            None if epoch.pool.starts is None else epoch.pool.starts.data for epoch in epochs
        ]
        """First token by chunk. A memoryview is indexed several times faster than an array."""
        self.scattered = np.array([starts is not None for starts in self.starts], np.bool_)

    def locate(self, indices: Int64, numbers: Int64, rows: Int64) -> tuple[Int64, dict[int, Int64]]:
        """Locate rows[i] of the epoch at indices[i] in this table.

        An epoch may stand for a later one of its source, with the number numbers[i]. Returns the
        first token by row; and for rows with several spans, their spans by index.
        """
        windows, window_starts, sizes = self.windows(indices, rows)
        window_keys, chunk_keys = self.derive_keys(indices, numbers, windows)
        shuffled = window_starts + permute(window_keys, sizes, rows - window_starts)
        chunk_rows = self.chunk[indices] // self.length
        slots, row_in_chunk = np.divmod(shuffled, chunk_rows)
        num_chunks = self.num_chunks[indices]
        first_tokens = np.empty(len(rows), np.int64)
        in_chunk = np.flatnonzero(slots < num_chunks)
        keys = chunk_keys if chunk_keys.shape[1] == 1 else chunk_keys[:, in_chunk]
        chunks = permute(keys, num_chunks[in_chunk], slots[in_chunk])
        direction = self.direction[indices[in_chunk]]
        if direction.any():
            in_order = keep_order(direction, num_chunks[in_chunk], slots[in_chunk])
            chunks = np.where(direction, in_order, chunks)
        chunk_starts = self.chunk_starts(indices[in_chunk], chunks)
        first_tokens[in_chunk] = chunk_starts + row_in_chunk[in_chunk] * self.length
        if len(in_chunk) == len(rows):
            return first_tokens, {}
        spans_by_row: dict[int, Int64] = {}
        in_remainder = np.flatnonzero(slots >= num_chunks)
        full_rows = num_chunks[in_remainder] * chunk_rows[in_remainder]
        remainder_rows = shuffled[in_remainder] - full_rows
        distinct, owners = np.unique(indices[in_remainder], return_inverse=True)
        for first, remainders in self._batch_remainders(distinct):
            chosen = np.flatnonzero((owners >= first) & (owners < first + len(remainders)))
            batch = in_remainder[chosen]
            first_tokens[batch], batch_spans = locate_rows(
                remainders, self.length, owners[chosen] - first, remainder_rows[chosen]
            )
            spans_by_row |= {int(batch[row]): spans for row, spans in batch_spans.items()}
        return first_tokens, spans_by_row

    def windows(self, indices: Int64, rows: Int64) -> tuple[Int64, Int64, Int64]:
        """Return each row's window: its number, first row, and size in rows."""
        sizes, last_window_start = self.window_rows[indices], self.last_window_start[indices]
        in_last = rows >= last_window_start
        windows = np.where(in_last, self.last_window[indices], rows // sizes)
        starts = np.where(in_last, last_window_start, windows * sizes)
        last_size = self.end_row[indices] - last_window_start
        return windows, starts, np.where(in_last, last_size, sizes)

    def derive_keys(self, indices: Int64, numbers: Int64, windows: Int64) -> tuple[UInt64, UInt64]:
        """Derive the round keys by row, for its window and for the epoch's chunks.

        If all rows lie in one window, there is one key instead.
        """
        columns = np.stack([indices, numbers, windows])
        order = np.lexsort(columns[::-1])
        columns = columns[:, order]
        is_new = np.ones(len(order), np.bool_)
        is_new[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        key_by_row = np.empty(len(order), np.int64)
        key_by_row[order] = np.cumsum(is_new) - 1
        distinct = [
            (self.epochs[index].shuffle, number, window)
            for index, number, window in zip(*columns[:, is_new].tolist(), strict=True)
        ]
        window_keys = derive_keys(
            shuffle.permutation_name(number, window) for shuffle, number, window in distinct
        )
        chunk_keys = derive_keys(
            shuffle.permutation_name(number, ALL_CHUNKS) for shuffle, number, _ in distinct
        )
        if len(distinct) == 1:
            return window_keys, chunk_keys
        return window_keys[:, key_by_row], chunk_keys[:, key_by_row]

    def chunk_starts(self, indices: Int64, chunks: Int64) -> Int64:
        """Return the first token of chunks[i] in the epoch at indices[i]."""
        starts: Int64 = chunks * self.chunk[indices]
        scattered = np.flatnonzero(self.scattered[indices])
        starts[scattered] = [
            self.starts[index][chunk]
            for index, chunk in zip(
                indices[scattered].tolist(), chunks[scattered].tolist(), strict=True
            )
        ]
        return starts

    def _batch_remainders(self, indices: Int64) -> Iterator[tuple[int, list[Remainder]]]:
        """Yield the epochs' remainders in batches, with the number of earlier ones."""
        first, num_spans, batch = 0, 0, list[Remainder]()
        for index in indices.tolist():
            batch.append(load_remainder(self.epochs[index]))
            num_spans += len(batch[-1].spans)
            if num_spans > MAX_SPANS:
                yield first, batch
                first, num_spans, batch = first + len(batch), 0, []
        if batch:
            yield first, batch


def load_remainder(epoch: Epoch) -> Remainder:
    """Load an epoch's remainder from the cache, or compute it."""
    if epoch.uncut is None:
        return epoch.pool.tails
    name = (epoch.shuffle, epoch.number, epoch.cuts)
    packed = REMAINDERS.get(name)
    if packed is not None:
        return Remainder(packed.unpack())
    remainder = _compute_remainder(epoch)
    packed = PackedSpans.pack(remainder.spans, math.gcd(*(cut.length for cut in epoch.cuts)))
    REMAINDERS.put(name, packed, packed.nbytes)
    return remainder


def _compute_remainder(epoch: Epoch) -> Remainder:
    """Compute the remainder; caches none of the earlier ones, which serve no more rows."""
    if epoch.uncut is None:
        return epoch.pool.tails
    uncut, (row, length) = epoch.uncut
    earlier = _compute_remainder(uncut)
    if epoch.first_window < epoch.num_windows:
        rows = np.arange(row, uncut.window_start(epoch.first_window, length))
        spans = [_row_spans(uncut, length, rows), earlier.spans]
    else:  # the begun window is the last one: the remainder is among its rows
        rows = np.arange(row, uncut.end_row(length))
        spans = [_row_spans(uncut, length, rows), earlier.unserved_spans(length)]
    return Remainder(merge_spans(np.concatenate(spans)))


def served_spans(epoch: Epoch, length: int, first_row: int, end_row: int) -> Int64:
    """List the token spans [start, end) that the rows [first_row, end_row) serve."""
    window_rows = epoch.window_rows(length)
    # Full windows as chunks; the rows before and after them one by one, as is the last window,
    # which includes the remainder.
    first = -(-first_row // window_rows)
    end = min(end_row // window_rows, epoch.chunks_before_last_window // epoch.window)
    if first >= end:
        first = end = -(-end_row // window_rows)
    rows = np.concatenate(
        [
            np.arange(first_row, min(first * window_rows, end_row)),
            np.arange(end * window_rows, end_row),
        ]
    )
    spans = [_row_spans(epoch, length, rows), _chunk_spans(epoch, first, end)]
    return merge_spans(np.concatenate(spans))


def unserved_spans(epoch: Epoch, row: int, length: int) -> Int64:
    """List the token spans that are not served before `row`.

    After the last row there are none: the epoch has ended.
    """
    if epoch.first_row(length) < row >= epoch.end_row(length):
        return np.empty((0, 2), np.int64)
    window = epoch.count_windows(row, length)
    remainder = load_remainder(epoch.cut(row, length))
    chunks = _chunk_spans(epoch, window, epoch.num_windows)
    return merge_spans(np.concatenate([chunks, remainder.spans]))


def find_rows(epoch: Epoch, length: int, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """Find the rows with an input among the tokens [starts[i], ends[i]), for all i.

    Returns pairs, sorted: i, and the row.
    """
    full_rows = epoch.pool.num_chunks * (epoch.chunk // length)
    owners, shuffled = _find_in_chunks(epoch, length, starts, ends)
    remainder_owners, remainder_rows = load_remainder(epoch).find_rows(length, starts, ends)
    owners = np.concatenate([owners, remainder_owners])
    shuffled = np.concatenate([shuffled, full_rows + remainder_rows])
    is_left = shuffled >= epoch.first_row(length)
    owners, shuffled = owners[is_left], shuffled[is_left]
    if not len(owners):
        return owners, shuffled
    epochs, index = Epochs([epoch], length), np.zeros(len(shuffled), np.int64)
    windows, window_starts, sizes = epochs.windows(index, shuffled)
    keys, _ = epochs.derive_keys(index, index + epoch.number, windows)
    rows = window_starts + invert(keys, sizes, shuffled - window_starts)
    order = np.lexsort([rows, owners])
    return owners[order], rows[order]


def _row_spans(epoch: Epoch, length: int, rows: Int64) -> Int64:
    """List the token spans [start, end) that rows serve."""
    index = np.zeros(len(rows), np.int64)
    tokens, spans_by_row = Epochs([epoch], length).locate(index, index + epoch.number, rows)
    is_contiguous = np.ones(len(rows), np.bool_)
    is_contiguous[list(spans_by_row)] = False
    starts = tokens[is_contiguous]
    return np.concatenate([np.stack([starts, starts + length], axis=1), *spans_by_row.values()])


def _chunk_spans(epoch: Epoch, first_window: int, end_window: int) -> Int64:
    """List the token spans [start, end) that windows serve in full chunks."""
    num_chunks, starts = epoch.pool.num_chunks, epoch.pool.starts
    slots = np.arange(first_window * epoch.window, min(end_window * epoch.window, num_chunks))
    if epoch.shuffle.direction:
        chunks = keep_order(epoch.shuffle.direction, num_chunks, slots)
    else:
        chunks = permute(_chunk_keys(epoch), num_chunks, slots.astype(np.int64))
    chunk_starts = chunks * epoch.chunk if starts is None else starts[chunks]
    return np.stack([chunk_starts, chunk_starts + epoch.chunk], axis=1)


def keep_order(direction: int | Int64, num_chunks: int | Int64, slots: Int64) -> Int64:
    """Return the chunks at slots of a sorted source, whose direction is 1 or -1."""
    return np.where(np.equal(direction, -1), num_chunks - 1 - slots, slots)


def _chunk_keys(epoch: Epoch) -> UInt64:
    return derive_key(*epoch.shuffle.permutation_name(epoch.number, ALL_CHUNKS))


def _find_in_chunks(epoch: Epoch, length: int, starts: Int64, ends: Int64) -> tuple[Int64, Int64]:
    """Find the rows of full chunks, before the shuffle of their window, with an input among the
    tokens [starts[i], ends[i]); returns i and the row, in pairs."""
    pool, size = epoch.pool, epoch.chunk
    if pool.starts is None:
        first_chunks, end_chunks = starts // size, np.minimum(-(-ends // size), pool.num_chunks)
    else:
        first_chunks = np.searchsorted(pool.starts, starts - size, side="right")
        end_chunks = np.searchsorted(pool.starts, ends)
    owners, chunks = expand_ranges(first_chunks, np.where(starts < ends, end_chunks, 0))
    if not len(owners):
        return owners, chunks
    chunk_starts = chunks * size if pool.starts is None else pool.starts[chunks]
    if epoch.shuffle.direction:  # its own inverse
        slots = keep_order(epoch.shuffle.direction, pool.num_chunks, chunks)
    else:
        slots = invert(_chunk_keys(epoch), pool.num_chunks, chunks)
    low = np.maximum(starts[owners] - chunk_starts, 0) // length
    high = -(-np.minimum(ends[owners] - chunk_starts, size) // length)
    pairs, rows_in_chunk = expand_ranges(low, high)
    return owners[pairs], slots[pairs] * (size // length) + rows_in_chunk
