"""The tokens of epochs' rows: found for the rows of many epochs, of many sources, at once.

    row → its window → its place in the shuffled window → chunk, or remainder → tokens

A call of numpy costs as much for one row as for hundreds, and a mixture may have thousands of
sources. So the numbers of epochs are columns, and every step is done for all rows together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...arrays import Int64
from . import remainder as remainders
from .bounded import Bounded
from .epoch import CHUNKS, Cut, Epoch, Shuffle
from .packed import Packed
from .permutation import UInt64, invert, key, keys_of, permute
from .remainder import Remainder, joined

REMAINDERS_BYTES = 8 << 20
"""Bytes of the remainders of cut epochs that a process keeps. All else is made quickly."""
SPANS = 1 << 12
"""Spans of remainders that are searched together: larger arrays leave a core's cache."""

REMAINDERS: Bounded[tuple[Shuffle, int, tuple[Cut, ...]], Packed] = Bounded(REMAINDERS_BYTES)
"""By source, epoch and cuts."""


class Epochs:
    """Epochs, in rows of one length."""

    def __init__(self, epochs: Sequence[Epoch], length: int) -> None:
        self.epochs, self.length = epochs, length
        columns = [
            (
                epoch.chunk,
                epoch.pool.whole,
                epoch.window_rows(length),
                epoch.last_chunks * (epoch.chunk // length),
                epoch.last_window,
                epoch.rows(length),
            )
            for epoch in epochs
        ]
        self.chunk, self.whole, self.window_rows, self.last_row, self.last_window, self.end_row = (
            np.array(columns, np.int64).reshape(-1, 6).T
        )
        """Tokens of a chunk, and whole chunks; rows of a window but the last; first row of the last
        window, and its number; one past the last row."""
        self.starts = [
            None if each.pool.starts is None else each.pool.starts.data for each in epochs
        ]
        """Of chunks. Indexing these is several times faster than indexing numpy arrays."""
        self.scattered = np.array([starts is not None for starts in self.starts], np.bool_)

    def locate(self, places: Int64, numbers: Int64, rows: Int64) -> tuple[Int64, dict[int, Int64]]:
        """Return the first token of each row, and the spans of the rows that have several.

        A row has the place of its epoch among these. `numbers` are those of the epochs, which may
        stand for later ones of their sources."""
        windows, firsts, sizes = self.windows(places, rows)
        window_keys, chunk_keys = self.keys(places, numbers, windows)
        shuffled = firsts + permute(window_keys, sizes, rows - firsts)
        in_chunk = self.chunk[places] // self.length
        slots, inside = np.divmod(shuffled, in_chunk)
        whole = self.whole[places]
        tokens = np.empty(len(rows), np.int64)
        at = np.flatnonzero(slots < whole)
        keys = chunk_keys if chunk_keys.shape[1] == 1 else chunk_keys[:, at]
        chunks = permute(keys, whole[at], slots[at])
        tokens[at] = self.chunk_starts(places[at], chunks) + inside[at] * self.length
        if len(at) == len(rows):
            return tokens, {}
        pieces: dict[int, Int64] = {}
        at = np.flatnonzero(slots >= whole)
        beyond = shuffled[at] - whole[at] * in_chunk[at]
        distinct, owners = np.unique(places[at], return_inverse=True)
        for first, part in self._remainders(distinct):
            chosen = np.flatnonzero((owners >= first) & (owners < first + len(part)))
            tokens[at[chosen]], parts = remainders.locate(
                part, self.length, owners[chosen] - first, beyond[chosen]
            )
            pieces |= {int(at[chosen[row]]): spans for row, spans in parts.items()}
        return tokens, pieces

    def windows(self, places: Int64, rows: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the number of each row's window, its first row, and its size in rows."""
        size, last_row = self.window_rows[places], self.last_row[places]
        in_last = rows >= last_row
        windows = np.where(in_last, self.last_window[places], rows // size)
        firsts = np.where(in_last, last_row, windows * size)
        return windows, firsts, np.where(in_last, self.end_row[places] - last_row, size)

    def keys(self, places: Int64, numbers: Int64, windows: Int64) -> tuple[UInt64, UInt64]:
        """Return the round keys of the rows' windows, and of the chunks of their epochs; those of
        one if all are equal."""
        columns = np.stack([places, numbers, windows])
        order = np.lexsort(columns[::-1])
        columns = columns[:, order]
        fresh = np.ones(len(order), np.bool_)
        fresh[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        back = np.empty(len(order), np.int64)
        back[order] = np.cumsum(fresh) - 1
        named = [
            (self.epochs[place].shuffle, number, window)
            for place, number, window in zip(*columns[:, fresh].tolist(), strict=True)
        ]
        window_keys = keys_of(shuffle.permutation(*name) for shuffle, *name in named)
        chunk_keys = keys_of(shuffle.permutation(number, CHUNKS) for shuffle, number, _ in named)
        if len(named) == 1:
            return window_keys, chunk_keys
        return window_keys[:, back], chunk_keys[:, back]

    def chunk_starts(self, places: Int64, chunks: Int64) -> Int64:
        """Return the first token of chunks of the epochs' pools."""
        starts: Int64 = chunks * self.chunk[places]
        at = np.flatnonzero(self.scattered[places])
        starts[at] = [
            self.starts[place][chunk]
            for place, chunk in zip(places[at].tolist(), chunks[at].tolist(), strict=True)
        ]
        return starts

    def _remainders(self, places: Int64) -> Iterator[tuple[int, list[Remainder]]]:
        """Yield the remainders of epochs in parts, each after the number of those before it."""
        first, spans, part = 0, 0, list[Remainder]()
        for place in places.tolist():
            part.append(remainder_of(self.epochs[place]))
            spans += len(part[-1].spans)
            if spans > SPANS:
                yield first, part
                first, spans, part = first + len(part), 0, []
        if part:
            yield first, part


def remainder_of(epoch: Epoch) -> Remainder:
    """Return the remainder of an epoch."""
    if epoch.before is None:
        return epoch.pool.tails
    name = (epoch.shuffle, epoch.number, epoch.cuts)
    packed = REMAINDERS.get(name)
    if packed is not None:
        return Remainder(packed.spans())
    remainder = _make_remainder(epoch)
    packed = Packed.of(remainder.spans, math.gcd(*(cut.length for cut in epoch.cuts)))
    REMAINDERS.keep(name, packed, packed.nbytes)
    return remainder


def _make_remainder(epoch: Epoch) -> Remainder:
    """Return the remainder; keep none of those before the cuts, which serve no more rows."""
    if epoch.before is None:
        return epoch.pool.tails
    whole, (row, length) = epoch.before
    older = _make_remainder(whole)
    if epoch.begun < epoch.windows:
        rows = np.arange(row, whole.row_of(epoch.begun, length))
        spans = [_spans(whole, length, rows), older.spans]
    else:  # the begun window is the last one: the remainder is among its rows
        rows = np.arange(row, whole.rows(length))
        spans = [_spans(whole, length, rows), older.unused(length)]
    return Remainder(joined(np.concatenate(spans)))


def taken(epoch: Epoch, length: int, first: int, last: int) -> Int64:
    """Return the token spans [start, end) of the rows [first, last)."""
    in_window = epoch.window_rows(length)
    # Whole windows as chunks; the rows before and after them one by one, as is the last
    # window, which has the remainder.
    begin = -(-first // in_window)
    end = min(last // in_window, epoch.last_chunks // epoch.window)
    if begin >= end:
        begin = end = -(-last // in_window)
    outside = [np.arange(first, min(begin * in_window, last)), np.arange(end * in_window, last)]
    rows = _spans(epoch, length, np.concatenate(outside))
    return joined(np.concatenate([rows, _chunks(epoch, begin, end)]))


def after(epoch: Epoch, row: int, length: int) -> Int64:
    """Return the token spans that the rows before `row` have left; none if they are all rows of
    this length, because the epoch has ended then."""
    if epoch.first_row(length) < row >= epoch.rows(length):
        return np.empty((0, 2), np.int64)
    begun = epoch.windows_begun(row, length)
    rest = remainder_of(epoch.cut(row, length))
    return joined(np.concatenate([_chunks(epoch, begun, epoch.windows), rest.spans]))


def rows_with(epoch: Epoch, length: int, start: int, end: int) -> Int64:
    """Return the rows, in order, with an input among the tokens [start, end)."""
    if start >= end:
        return np.empty(0, np.int64)
    in_chunk = epoch.chunk // length
    matches = np.concatenate(
        [
            (slots[:, None] * in_chunk + places).ravel()
            for slots, places in _places_with(epoch, length, start, end)
        ]
        + [epoch.pool.whole * in_chunk + remainder_of(epoch).rows_with(length, start, end)]
    )
    matches = matches[matches >= epoch.first_row(length)]
    epochs, place = Epochs([epoch], length), np.zeros(len(matches), np.int64)
    windows, firsts, sizes = epochs.windows(place, matches)
    keys, _ = epochs.keys(place, place + epoch.number, windows)
    return np.sort(firsts + invert(keys, sizes, matches - firsts))


def _spans(epoch: Epoch, length: int, rows: Int64) -> Int64:
    """Return the token spans [start, end) of rows."""
    place = np.zeros(len(rows), np.int64)
    tokens, pieces = Epochs([epoch], length).locate(place, place + epoch.number, rows)
    single = np.ones(len(rows), np.bool_)
    single[list(pieces)] = False
    spans = np.stack([tokens[single], tokens[single] + length], axis=1)
    return np.concatenate([spans, *pieces.values()])


def _chunks(epoch: Epoch, first: int, last: int) -> Int64:
    """Return the token spans [start, end) of the whole chunks of windows [first, last)."""
    slots = np.arange(first * epoch.window, min(last * epoch.window, epoch.pool.whole))
    chunks = permute(_chunk_keys(epoch), epoch.pool.whole, slots.astype(np.int64))
    starts = chunks * epoch.chunk if epoch.pool.starts is None else epoch.pool.starts[chunks]
    return np.stack([starts, starts + epoch.chunk], axis=1)


def _chunk_keys(epoch: Epoch) -> UInt64:
    return key(*epoch.shuffle.permutation(epoch.number, CHUNKS))


def _places_with(epoch: Epoch, length: int, start: int, end: int) -> Iterator[tuple[Int64, Int64]]:
    """Yield the slots of the whole chunks that hold one of the tokens [start, end), and the rows of
    a chunk that do: for the inner chunks together, then for the first and the last."""
    pool, size = epoch.pool, epoch.chunk
    if not pool.whole:
        return
    if pool.starts is None:
        chunks = np.arange(start // size, min(-(-end // size), pool.whole))
        starts = chunks * size
    else:
        first = np.searchsorted(pool.starts, start - size, side="right")
        chunks = np.arange(first, np.searchsorted(pool.starts, end))
        starts = pool.starts[chunks]
    slots = invert(_chunk_keys(epoch), pool.whole, chunks)
    inner = (starts >= start) & (starts + size <= end)
    if inner.any():
        yield slots[inner], np.arange(size // length)
    for slot, chunk in zip(slots[~inner], starts[~inner].tolist(), strict=True):
        low, high = max(start - chunk, 0), min(end - chunk, size)
        yield np.array([slot]), np.arange(low // length, -(-high // length))
