"""The order of one source: epochs of chunks, permuted; and of rows, permuted within windows.

    epoch ── chunk 17 ── chunk 3 ── chunk 40 │ chunk 8 ── …        chunks in a permuted order
             └──────── a window ───────────┘ └─ the next …         `window` chunks at a time
             row 9, row 2, row 31, …                               its rows in a permuted order

The tokens of a chunk are a multiple of every sequence length of the plan, so rows of another length
can start at any window without cutting a row in two. The rest after the last whole chunk is a
shorter chunk, a tail, and belongs to the last window. The last token of a source is only ever a
target.

A plan that continues another starts with the pool of chunks that its parent had not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..arrays import Int64
from .permutation import Permutation, key

CHUNKS = -1
PERMUTATIONS = 8
"""Permutations kept in memory per source: that of its chunks, and those of a few windows."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a source: row `row`, of the current length, of epoch `epoch`."""

    epoch: int = 0
    row: int = 0


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The tokens that another order had left of its epoch at a position."""

    order: SourceOrder
    position: Position
    length: int


@dataclass(frozen=True, eq=False)
class Pool:
    """The chunks of an epoch: `whole` full chunks, which start at `starts`, and shorter tails."""

    whole: int
    tails: Int64
    """[start, tokens] of each tail."""
    starts: Int64 | None = None
    """None: whole chunks are contiguous from token 0."""


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """The order of one source, for rows of any length that divides its chunks."""

    seed: int
    name: str
    tokens: int
    chunk: int
    """Tokens of a chunk."""
    window: int
    """Chunks of a window."""
    rest: Rest | None = None
    """The tokens of this order's first epoch, if it continues another."""
    _permutations: dict[tuple[int, int, int], Permutation] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rows(self, epoch: int, length: int) -> int:
        """Return the number of rows of an epoch."""
        pool = self._pool(epoch)
        return pool.whole * (self.chunk // length) + int((pool.tails[:, 1] // length).sum())

    def advance(self, position: Position, length: int, draws: int) -> Position:
        """Return the position `draws` rows after `position`."""
        if not draws:  # also if the source has no row of this length
            return position
        epoch, row = self._locate(position, length, np.array([draws], np.int64))
        return Position(epoch=int(epoch[0]), row=int(row[0]))

    def next_window(self, position: Position, length: int) -> Position:
        """Return the next position where rows of another length may start, in rows of `length`."""
        window = self._windows_begun(position, length)
        if window < self._windows(position.epoch):
            return Position(epoch=position.epoch, row=window * self._window_rows(length))
        return Position(epoch=position.epoch + 1)

    def convert(self, position: Position, length: int, other: int) -> Position:
        """Convert the start of a window to rows of another length."""
        assert position.row % self._window_rows(length) == 0, position
        return Position(epoch=position.epoch, row=position.row * length // other)

    def offsets(self, position: Position, length: int, draws: Int64) -> tuple[Int64, Int64]:
        """Return the epoch and the first token of the rows `draws` rows after `position`."""
        epochs, rows = self._locate(position, length, draws)
        tokens = np.empty(len(rows), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            tokens[chosen] = self._epoch_offsets(int(epoch), length, rows[chosen])
        return epochs, tokens

    def rows_with(self, epoch: int, length: int, start: int, end: int) -> Int64:
        """Return the rows of an epoch, in order, with an input among the tokens [start, end)."""
        if start >= end:
            return np.empty(0, np.int64)
        pool = self._pool(epoch)
        in_chunk = self.chunk // length
        shuffled = [
            (slots[:, None] * in_chunk + places).ravel()
            for slots, places in self._places_with(epoch, pool, length, start, end)
        ]
        before = pool.whole * in_chunk
        for tail, tokens in pool.tails.tolist():
            rows = tokens // length
            low, high = max(start - tail, 0) // length, -(-min(end - tail, tokens) // length)
            shuffled.append(before + np.arange(low, max(low, min(high, rows)), dtype=np.int64))
            before += rows
        matches = np.concatenate([*shuffled, np.empty(0, np.int64)])

        in_window = self._window_rows(length)
        windows = np.minimum(matches // in_window, self._windows(epoch) - 1)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            first = window * in_window
            last = before if window == self._windows(epoch) - 1 else first + in_window
            order = self._permutation(epoch, window, last - first)
            matches[chosen] = first + order.place(matches[chosen] - first)
        return np.sort(matches)

    def taken(self, position: Position, length: int, draws: int) -> Iterator[tuple[int, Int64]]:
        """Yield, by epoch, the token spans [start, end) of the `draws` rows after `position`."""
        in_window = self._window_rows(length)
        epoch, row = position.epoch, position.row
        while draws > 0:
            left = max(self.rows(epoch, length) - row, 0)
            last = row + min(draws, left)
            # Whole windows as chunks; the rows before and after them one by one, as is the last
            # window, which has tails.
            begin, end = -(-row // in_window), min(last // in_window, self._windows(epoch) - 1)
            if begin >= end:
                begin = end = -(-last // in_window)
            slots = np.arange(begin * self.window, end * self.window, dtype=np.int64)
            chunks = self._chunk_starts(epoch, self._pool(epoch), slots)
            outside = [
                np.arange(row, min(begin * in_window, last)),
                np.arange(end * in_window, last),
            ]
            rows = self._epoch_offsets(epoch, length, np.concatenate(outside))
            spans = [
                np.stack([rows, rows + length], axis=1),
                np.stack([chunks, chunks + self.chunk], axis=1),
            ]
            yield epoch, joined(np.concatenate(spans))
            draws -= last - row
            epoch, row = epoch + 1, 0

    def untouched(self, position: Position, length: int) -> Int64:
        """Return the token spans of the epoch in windows that no row before `position` is in."""
        pool = self._pool(position.epoch)
        window = self._windows_begun(position, length)
        if window >= self._windows(position.epoch):
            return np.empty((0, 2), np.int64)
        slots = np.arange(window * self.window, pool.whole, dtype=np.int64)
        starts = self._chunk_starts(position.epoch, pool, slots)
        whole = np.stack([starts, starts + self.chunk], axis=1)
        tails = np.stack([pool.tails[:, 0], pool.tails.sum(axis=1)], axis=1)
        return joined(np.concatenate([whole, tails]))

    def _pool(self, epoch: int) -> Pool:
        if self.rest is not None and epoch == self.rest.position.epoch:
            return self._rest_pool
        return self._full_pool

    @cached_property
    def _full_pool(self) -> Pool:
        whole, tail = divmod(max(self.tokens - 1, 0), self.chunk)
        tails = [[whole * self.chunk, tail]] if tail else []
        return Pool(whole, np.array(tails, np.int64).reshape(-1, 2))

    @cached_property
    def _rest_pool(self) -> Pool:
        """Whole chunks cut from the rest of the parent's epoch. Of the shorter remainders, only the
        longest are kept, as many as a window has chunks: more would spread the last window over
        the whole source."""
        assert self.rest is not None
        before = self.rest.order
        spans = before.untouched(self.rest.position, self.rest.length)
        if self.tokens > before.tokens:
            # The source has grown: its former last token is the first input of the new tokens.
            spans = joined(np.append(spans, [[before.tokens - 1, self.tokens - 1]], axis=0))
        sizes = spans[:, 1] - spans[:, 0]
        counts, extra = np.divmod(sizes, self.chunk)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks = np.repeat(spans[:, 0], counts) + within * self.chunk
        tails = np.stack([spans[:, 1] - extra, extra], axis=1)[extra > 0]
        kept = np.sort(np.argsort(-tails[:, 1], kind="stable")[: self.window])
        return Pool(len(chunks), tails[kept], chunks)

    def _windows(self, epoch: int) -> int:
        return max(1, -(-self._pool(epoch).whole // self.window))

    def _window_rows(self, length: int) -> int:
        return self.window * (self.chunk // length)

    def _windows_begun(self, position: Position, length: int) -> int:
        """Return the number of windows of the epoch with a row before `position`."""
        return min(-(-position.row // self._window_rows(length)), self._windows(position.epoch))

    def _locate(self, position: Position, length: int, draws: Int64) -> tuple[Int64, Int64]:
        """Return the epoch of each draw, and its row in that epoch."""
        rows = position.row + draws
        over = rows - self.rows(position.epoch, length)
        beyond = over >= 0
        if not beyond.any():
            return np.full(len(draws), position.epoch, np.int64), rows
        later = max(self.rows(position.epoch + 1, length), 1)
        epochs = np.where(beyond, position.epoch + 1 + over // later, position.epoch)
        return epochs, np.where(beyond, over % later, rows)

    def _epoch_offsets(self, epoch: int, length: int, rows: Int64) -> Int64:
        """Return the first token of each row of an epoch."""
        pool = self._pool(epoch)
        in_window = self._window_rows(length)
        windows = np.minimum(rows // in_window, self._windows(epoch) - 1)
        total = self.rows(epoch, length)
        shuffled = np.empty(len(rows), np.int64)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            first = window * in_window
            last = total if window == self._windows(epoch) - 1 else first + in_window
            order = self._permutation(epoch, window, last - first)
            shuffled[chosen] = first + order.image(rows[chosen] - first)

        in_chunk = self.chunk // length
        in_tails = shuffled >= pool.whole * in_chunk
        tokens = np.empty(len(rows), np.int64)
        slots, places = np.divmod(shuffled[~in_tails], in_chunk)
        tokens[~in_tails] = self._chunk_starts(epoch, pool, slots) + places * length
        if in_tails.any():
            tokens[in_tails] = _tail_rows(pool.tails, length)[
                shuffled[in_tails] - pool.whole * in_chunk
            ]
        return tokens

    def _chunk_starts(self, epoch: int, pool: Pool, slots: Int64) -> Int64:
        """Return the first token of the chunks at these slots of the epoch's order."""
        chunks = self._permutation(epoch, CHUNKS, pool.whole).image(slots)
        return chunks * self.chunk if pool.starts is None else pool.starts[chunks]

    def _places_with(
        self, epoch: int, pool: Pool, length: int, start: int, end: int
    ) -> list[tuple[Int64, Int64]]:
        """Return the slots of the whole chunks that hold one of the tokens [start, end), and the
        rows of a chunk that do: for the inner chunks together, then for the first and the last."""
        if not pool.whole:
            return []
        if pool.starts is None:
            chunks = np.arange(start // self.chunk, min(-(-end // self.chunk), pool.whole))
            starts = chunks * self.chunk
        else:
            first = np.searchsorted(pool.starts, start - self.chunk, side="right")
            chunks = np.arange(first, np.searchsorted(pool.starts, end))
            starts = pool.starts[chunks]
        slots = self._permutation(epoch, CHUNKS, pool.whole).place(chunks)
        places = []
        inner = (starts >= start) & (starts + self.chunk <= end)
        if inner.any():
            places.append((slots[inner], np.arange(self.chunk // length)))
        for slot, chunk in zip(slots[~inner], starts[~inner].tolist(), strict=True):
            low, high = max(start - chunk, 0), min(end - chunk, self.chunk)
            places.append((np.array([slot]), np.arange(low // length, -(-high // length))))
        return places

    def _permutation(self, epoch: int, window: int, length: int) -> Permutation:
        """Return the permutation of a window's rows, or of the epoch's chunks (CHUNKS)."""
        name = (epoch, window, length)
        permutation = self._permutations.get(name)
        if permutation is None:
            if len(self._permutations) >= PERMUTATIONS:
                self._permutations.clear()
            permutation = Permutation(key(self.seed, self.name, epoch, window), length)
            self._permutations[name] = permutation
        return permutation


def _tail_rows(tails: Int64, length: int) -> Int64:
    """Return the first token of each row in the tails."""
    rows = [start + np.arange(tokens // length) * length for start, tokens in tails.tolist()]
    return np.concatenate(rows)


def joined(spans: Int64) -> Int64:
    """Sort spans [start, end) and merge those that touch."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    apart = np.flatnonzero(spans[1:, 0] != spans[:-1, 1]) + 1
    starts = spans[np.concatenate([[0], apart]), 0] if len(spans) else spans[:, 0]
    ends = spans[np.concatenate([apart - 1, [-1]]), 1] if len(spans) else spans[:, 1]
    return np.stack([starts, ends], axis=1)
