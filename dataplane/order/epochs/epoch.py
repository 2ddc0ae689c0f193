"""An epoch of a source: its chunks in a permuted order, then its remainder, in windows of rows.

    chunk 17 ── chunk 3 ── chunk 40 │ chunk 8 ── … ── the last chunks ── the remainder
    └──────── a window ───────────┘ └─ the next …    └──── the last window ──────────┘
    row 9, row 2, row 31, …                           its rows in a permuted order

The tokens of a chunk are a multiple of every sequence length of the plan, so rows of another length
can start at any window without cutting a row in two. The remainder is every token that is in no
window of whole chunks: at first the tail after the last whole chunk.

Where the row length changes in the middle of a window, the epoch is cut: rows of the new length
start at the next window, and what the begun window had left joins the remainder. So an epoch
serves each token once, up to less than a row at its end, through any number of cuts; and every cut
is known from its row number and length alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...arrays import Int64
from .bounded import Bounded
from .packed import Packed
from .permutation import Permutation, key
from .remainder import Remainder, joined

CHUNKS = -1
PERMUTATIONS = 8
"""Permutations kept in memory per source: that of its chunks, and those of a few windows."""
REMAINDERS_BYTES = 8 << 20
"""Bytes of the remainders of cut epochs that a process keeps. All else is made quickly."""


class Cut(NamedTuple):
    """A change of the row length: `row` rows of `length` tokens were the last before it, counted
    like those of a position."""

    row: int
    length: int


@dataclass(frozen=True, eq=False, slots=True)
class Pool:
    """The tokens of an epoch: `whole` full chunks, which start at `starts`, and shorter tails."""

    whole: int
    tails: Remainder
    starts: Int64 | None = None
    """None: whole chunks are contiguous from token 0."""


@dataclass(frozen=True, eq=False, slots=True)
class Shuffle:
    """The permutations of a source's chunks, and of the rows of its windows."""

    seed: int
    name: str
    chunk: int
    """Tokens of a chunk."""
    window: int
    """Chunks of a window."""
    _kept: dict[tuple[int, int, int], Permutation] = field(default_factory=dict)

    def permutation(self, epoch: int, window: int, length: int) -> Permutation:
        """Return the permutation of a window's rows, or of the epoch's chunks (CHUNKS)."""
        name = (epoch, window, length)
        permutation = self._kept.get(name)
        if permutation is None:
            if len(self._kept) >= PERMUTATIONS:
                self._kept.clear()
            permutation = Permutation(key(self.seed, self.name, epoch, window), length)
            self._kept[name] = permutation
        return permutation


REMAINDERS: Bounded[tuple[Shuffle, int, tuple[Cut, ...]], Packed] = Bounded(REMAINDERS_BYTES)
"""By source, epoch and cuts."""


class Epoch:
    """The rows of an epoch, or those after a cut of it. Row numbers count whole windows from the
    epoch's start, as if all rows before the cut had the length of those after it."""

    def __init__(
        self, shuffle: Shuffle, number: int, pool: Pool, before: tuple[Epoch, Cut] | None = None
    ) -> None:
        """`before`: the epoch that was cut, and where."""
        self.shuffle, self.number, self.pool, self.before = shuffle, number, pool, before
        self.chunk, self.window = shuffle.chunk, shuffle.window
        self.windows = max(1, -(-pool.whole // self.window))
        """Windows of whole chunks; the last has the remainder too."""
        self.begun, self.cuts = 0, tuple[Cut, ...]()
        self.left = pool.whole * self.chunk + pool.tails.tokens
        """Tokens that the cuts have left."""
        if before is not None:
            epoch, (row, length) = before
            self.begun, self.cuts = epoch.windows_begun(row, length), (*epoch.cuts, before[1])
            self.left = epoch.tokens_left(row, length)
        self.chunks_left = pool.whole - min(self.begun * self.window, pool.whole)
        # After a cut in the last window, the remainder is a window of its own, with its own number.
        ended = self.begun >= self.windows
        self.last_window = self.windows + len(self.cuts) if ended else self.windows - 1
        self.last_chunks = pool.whole if ended else (self.windows - 1) * self.window
        """Chunks before the last window."""

    def rows(self, length: int) -> int:
        """Return the row number after the last row."""
        whole = self.pool.whole * (self.chunk // length)
        if self.before is None:
            return whole + self.pool.tails.rows(length)
        return whole + (self.left - self.chunks_left * self.chunk) // length

    def first_row(self, length: int) -> int:
        """Return the number of the first row."""
        return self.row_of(self.begun, length)

    def row_of(self, window: int, length: int) -> int:
        """Return the first row of a window, or of the remainder after all windows."""
        return min(window * self.window, self.pool.whole) * (self.chunk // length)

    def tokens_left(self, row: int, length: int) -> int:
        """Return the tokens that the rows before `row` have left."""
        return self.left - (row - self.first_row(length)) * length

    def windows_begun(self, row: int, length: int) -> int:
        """Return the number of windows with a row before `row`."""
        if row <= self.first_row(length):
            return self.begun
        if row > self.last_chunks * (self.chunk // length):
            return self.windows
        return -(-row // self._window_rows(length))

    def cut(self, row: int, length: int) -> Epoch:
        """Return the part of the epoch that the rows before `row` have left."""
        return Epoch(self.shuffle, self.number, self.pool, (self, Cut(row, length)))

    def ends_window(self, row: int, length: int) -> bool:
        """Return whether no window is begun and unfinished: other rows may start without a cut."""
        begun = self.windows_begun(row, length)
        in_window = begun < self.windows and row == begun * self._window_rows(length)
        return in_window or row == self.first_row(length)

    def locate(self, length: int, rows: Int64) -> tuple[Int64, dict[int, Int64]]:
        """Return the first token of each row, and the spans of the rows that have several."""
        shuffled = np.empty(len(rows), np.int64)
        windows = self._windows_of(rows, length)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            first, last = self._bounds(window, length)
            order = self.shuffle.permutation(self.number, window, last - first)
            shuffled[chosen] = first + order.image(rows[chosen] - first)

        in_chunk = self.chunk // length
        whole = self.pool.whole * in_chunk
        in_chunks = shuffled < whole
        tokens = np.empty(len(rows), np.int64)
        slots, places = np.divmod(shuffled[in_chunks], in_chunk)
        tokens[in_chunks] = self._chunk_starts(slots) + places * length
        others = np.flatnonzero(~in_chunks)
        if not len(others):
            return tokens, {}
        tokens[others], pieces = self._remainder.locate(length, shuffled[others] - whole)
        return tokens, {int(others[place]): spans for place, spans in pieces.items()}

    def rows_with(self, length: int, start: int, end: int) -> Int64:
        """Return the rows, in order, with an input among the tokens [start, end)."""
        if start >= end:
            return np.empty(0, np.int64)
        in_chunk = self.chunk // length
        matches = np.concatenate(
            [
                (slots[:, None] * in_chunk + places).ravel()
                for slots, places in self._places_with(length, start, end)
            ]
            + [self.pool.whole * in_chunk + self._remainder.rows_with(length, start, end)]
        )
        matches = matches[matches >= self.first_row(length)]
        windows = self._windows_of(matches, length)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            first, last = self._bounds(window, length)
            order = self.shuffle.permutation(self.number, window, last - first)
            matches[chosen] = first + order.place(matches[chosen] - first)
        return np.sort(matches)

    def taken(self, length: int, first: int, last: int) -> Int64:
        """Return the token spans [start, end) of the rows [first, last)."""
        in_window = self._window_rows(length)
        # Whole windows as chunks; the rows before and after them one by one, as is the last
        # window, which has the remainder.
        begin = -(-first // in_window)
        end = min(last // in_window, self.last_chunks // self.window)
        if begin >= end:
            begin = end = -(-last // in_window)
        outside = [
            np.arange(first, min(begin * in_window, last)),
            np.arange(end * in_window, last),
        ]
        rows = self._spans(length, np.concatenate(outside))
        return joined(np.concatenate([rows, self._chunks(begin, end)]))

    def after(self, row: int, length: int) -> Int64:
        """Return the token spans that the rows before `row` have left; none if they are all rows
        of this length, because the epoch has ended then."""
        if self.first_row(length) < row >= self.rows(length):
            return np.empty((0, 2), np.int64)
        begun = self.windows_begun(row, length)
        remainder = self.cut(row, length)._remainder
        return joined(np.concatenate([self._chunks(begun, self.windows), remainder.spans]))

    def untouched(self, row: int, length: int) -> Int64:
        """Return the token spans in windows that no row before `row` is in."""
        begun = self.windows_begun(row, length)
        if begun >= self.windows:
            return np.empty((0, 2), np.int64)
        chunks = self._chunks(begun, self.windows)
        return joined(np.concatenate([chunks, self._remainder.spans]))

    @property
    def _remainder(self) -> Remainder:
        if self.before is None:
            return self.pool.tails
        name = (self.shuffle, self.number, self.cuts)
        packed = REMAINDERS.get(name)
        if packed is not None:
            return Remainder(packed.spans())
        remainder = self._make_remainder()
        packed = Packed.of(remainder.spans, math.gcd(*(cut.length for cut in self.cuts)))
        REMAINDERS.keep(name, packed, packed.nbytes)
        return remainder

    def _make_remainder(self) -> Remainder:
        """Return the remainder; keep none of those before the cuts, which serve no more rows."""
        if self.before is None:
            return self.pool.tails
        epoch, (row, length) = self.before
        older = epoch._make_remainder()
        if self.begun < self.windows:
            rows = np.arange(row, self.begun * self._window_rows(length))
            spans = [epoch._spans(length, rows), older.spans]
        else:  # the begun window is the last one: the remainder is among its rows
            rows = np.arange(row, epoch.rows(length))
            spans = [epoch._spans(length, rows), older.unused(length)]
        return Remainder(joined(np.concatenate(spans)))

    def _window_rows(self, length: int) -> int:
        return self.window * (self.chunk // length)

    def _windows_of(self, rows: Int64, length: int) -> Int64:
        in_last = rows >= self.last_chunks * (self.chunk // length)
        return np.where(in_last, self.last_window, rows // self._window_rows(length))

    def _bounds(self, window: int, length: int) -> tuple[int, int]:
        """Return the rows [first, last) of a window."""
        if window == self.last_window:
            return self.last_chunks * (self.chunk // length), self.rows(length)
        return window * self._window_rows(length), (window + 1) * self._window_rows(length)

    def _spans(self, length: int, rows: Int64) -> Int64:
        """Return the token spans [start, end) of rows."""
        tokens, pieces = self.locate(length, rows)
        single = np.ones(len(rows), np.bool_)
        single[list(pieces)] = False
        spans = np.stack([tokens[single], tokens[single] + length], axis=1)
        return np.concatenate([spans, *pieces.values()])

    def _chunks(self, first: int, last: int) -> Int64:
        """Return the token spans [start, end) of the whole chunks of windows [first, last)."""
        slots = np.arange(first * self.window, min(last * self.window, self.pool.whole))
        starts = self._chunk_starts(slots.astype(np.int64))
        return np.stack([starts, starts + self.chunk], axis=1)

    def _chunk_starts(self, slots: Int64) -> Int64:
        """Return the first token of the chunks at these slots of the epoch's order."""
        pool = self.pool
        chunks = self.shuffle.permutation(self.number, CHUNKS, pool.whole).image(slots)
        return chunks * self.chunk if pool.starts is None else pool.starts[chunks]

    def _places_with(self, length: int, start: int, end: int) -> Iterator[tuple[Int64, Int64]]:
        """Yield the slots of the whole chunks that hold one of the tokens [start, end), and the
        rows of a chunk that do: for the inner chunks together, then for the first and the last."""
        pool = self.pool
        if not pool.whole:
            return
        if pool.starts is None:
            chunks = np.arange(start // self.chunk, min(-(-end // self.chunk), pool.whole))
            starts = chunks * self.chunk
        else:
            first = np.searchsorted(pool.starts, start - self.chunk, side="right")
            chunks = np.arange(first, np.searchsorted(pool.starts, end))
            starts = pool.starts[chunks]
        slots = self.shuffle.permutation(self.number, CHUNKS, pool.whole).place(chunks)
        inner = (starts >= start) & (starts + self.chunk <= end)
        if inner.any():
            yield slots[inner], np.arange(self.chunk // length)
        for slot, chunk in zip(slots[~inner], starts[~inner].tolist(), strict=True):
            low, high = max(start - chunk, 0), min(end - chunk, self.chunk)
            yield np.array([slot]), np.arange(low // length, -(-high // length))
