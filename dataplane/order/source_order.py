"""The order of a source: epoch after epoch, in rows of any length that divides its chunks.

    draw m → epoch, row → the first token of the row in its source

An epoch ends when less than a row is left of it. A change of the row length cuts it
(epochs/epoch.py), and skips nothing. The last token of a source is only ever a target.

A plan that continues another starts with what its parent had left of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..arrays import Int32, Int64
from .epochs import tokens
from .epochs.epoch import Cut, Epoch, Pool, Shuffle
from .epochs.remainder import Remainder, joined
from .epochs.tokens import Epochs

Cuts = tuple[Cut, ...]


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a source: row `row`, of the current length, of epoch `epoch`."""

    epoch: int = 0
    row: int = 0
    cuts: Cuts = ()
    """Where earlier changes of the row length have cut the epoch."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The tokens that another order had left of its epoch at a position."""

    order: SourceOrder
    position: Position
    length: int


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

    def rows(self, epoch: int, length: int, cuts: Cuts = ()) -> int:
        """Return the row number at which an epoch ends."""
        return self.epoch(epoch, cuts).rows(length)

    def tokens_left(self, position: Position, length: int) -> int:
        """Return the tokens of the epoch that are not served before a position."""
        return self.epoch(position.epoch, position.cuts).tokens_left(position.row, length)

    def rows_left(self, position: Position, length: int, max_epochs: int) -> int:
        """Return the rows from a position to the end of epoch `max_epochs`."""
        first, last = position.epoch, max_epochs - 1
        if first > last:
            return 0
        rows = self.rows(first, length, position.cuts) - position.row
        if first < last:
            rows += (last - first) * self.rows(first + 1, length)
        return max(rows, 0)

    def advance(self, position: Position, length: int, draws: int) -> Position:
        """Return the position `draws` rows after `position`."""
        if not draws:  # also if the source has no row of this length
            return position
        row = position.row + draws
        over = row - self.rows(position.epoch, length, position.cuts)
        if over < 0:
            return replace(position, row=row)
        epochs, row = divmod(over, max(self.rows(position.epoch + 1, length), 1))
        return Position(epoch=position.epoch + 1 + epochs, row=row)

    def change_length(self, position: Position, length: int, other: int) -> Position:
        """Return the position from which rows of another length serve all that is left."""
        epoch, cuts = self.epoch(position.epoch, position.cuts), position.cuts
        if not epoch.ends_window(position.row, length):
            cuts = (*cuts, Cut(position.row, length))
        window = epoch.windows_begun(position.row, length)
        return Position(epoch=position.epoch, row=epoch.row_of(window, other), cuts=cuts)

    def rows_with(self, position: Position, length: int, start: int, end: int) -> Int64:
        """Return the rows of an epoch from `position`'s cuts on, in order, with an input among the
        tokens [start, end)."""
        return tokens.rows_with(self.epoch(position.epoch, position.cuts), length, start, end)

    def taken(self, position: Position, length: int, draws: int) -> Iterator[tuple[int, Int64]]:
        """Yield, by epoch, the token spans [start, end) of the `draws` rows after `position`."""
        while draws > 0:
            epoch = self.epoch(position.epoch, position.cuts)
            last = min(position.row + draws, max(epoch.rows(length), position.row))
            yield position.epoch, tokens.taken(epoch, length, position.row, last)
            draws -= last - position.row
            position = Position(epoch=position.epoch + 1)

    def left(self, position: Position, length: int) -> Int64:
        """Return the token spans of the epoch that are not served before a position."""
        return tokens.after(self.epoch(position.epoch, position.cuts), position.row, length)

    def epoch(self, number: int, cuts: Cuts = ()) -> Epoch:
        epoch = Epoch(self._shuffle, number, self._pool(number))
        for cut in cuts:
            epoch = epoch.cut(*cut)
        return epoch

    @cached_property
    def _shuffle(self) -> Shuffle:
        return Shuffle(self.seed, self.name, self.chunk, self.window)

    def _pool(self, epoch: int) -> Pool:
        if self.rest is not None and epoch == self.rest.position.epoch:
            return self._rest_pool
        return self._full_pool

    @cached_property
    def _full_pool(self) -> Pool:
        whole, tail = divmod(max(self.tokens - 1, 0), self.chunk)
        first = whole * self.chunk
        tails = np.array([[first, first + tail]], np.int64) if tail else np.empty((0, 2), np.int64)
        return Pool(whole, Remainder(tails))

    @cached_property
    def _rest_pool(self) -> Pool:
        """Whole chunks cut from the rest of the parent's epoch, and the shorter pieces."""
        assert self.rest is not None
        before = self.rest.order
        spans = before.left(self.rest.position, self.rest.length)
        if self.tokens > before.tokens:
            # The source has grown: its former last token is the first input of the new tokens.
            spans = joined(np.append(spans, [[before.tokens - 1, self.tokens - 1]], axis=0))
        sizes = spans[:, 1] - spans[:, 0]
        counts, extra = np.divmod(sizes, self.chunk)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        chunks = np.repeat(spans[:, 0], counts) + within * self.chunk
        tails = np.stack([spans[:, 1] - extra, spans[:, 1]], axis=1)[extra > 0]
        return Pool(len(chunks), Remainder(tails), chunks)


class Draws:
    """The rows that sources serve from a position of each on, in rows of one length."""

    def __init__(
        self, orders: Sequence[SourceOrder], starts: Sequence[Position], length: int
    ) -> None:
        pairs = list(zip(orders, starts, strict=True))
        firsts = [order.epoch(start.epoch, start.cuts) for order, start in pairs]
        # All epochs after the first have the same rows, under other permutations.
        others = [order.epoch(start.epoch + 1) for order, start in pairs]
        self.epochs = Epochs([*firsts, *others], length)
        self.sources = len(pairs)
        self.first_epoch = np.array([start.epoch for start in starts], np.int64)
        self.first_row = np.array([start.row for start in starts], np.int64)

    def locate(self, sources: Int32 | Int64, draws: Int64) -> tuple[Int64, Int64, dict[int, Int64]]:
        """Return the epoch and the first token of the row of each source's draw, and the spans of
        the rows that have several."""
        later = sources + self.sources
        rows = self.first_row[sources] + draws
        over = rows - self.epochs.end_row[sources]
        turns, over_rows = np.divmod(over, np.maximum(self.epochs.end_row[later], 1))
        beyond = over >= 0
        numbers = self.first_epoch[sources] + np.where(beyond, 1 + turns, 0)
        places, rows = np.where(beyond, later, sources), np.where(beyond, over_rows, rows)
        return numbers, *self.epochs.locate(places, numbers, rows)
