"""A source's order: epoch after epoch, in rows with any length that divides the chunks.

    draw m → epoch, row → first token of the row in its source

An epoch ends when less than a row remains. A change of the row length cuts the epoch
(epochs/epoch.py) and skips nothing. The last token of a source is only ever a target.

A plan that continues another starts with the tokens that its parent has not served in this epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..arrays import Int32, Int64
from .epochs import tokens
from .epochs.epoch import Cut, Epoch, Pool, Shuffle
from .epochs.remainder import Remainder, merge_spans
from .epochs.tokens import Epochs

Cuts = tuple[Cut, ...]


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in a source: the next row, in rows of the current length, and the epoch."""

    epoch: int = 0
    row: int = 0
    cuts: Cuts = ()
    """Earlier changes of the row length within the epoch."""


@dataclass(frozen=True, kw_only=True)
class UnservedTokens:
    """Tokens in an epoch that another order has not served before a position."""

    order: SourceOrder
    position: Position
    length: int


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """A source's order, for rows with any length that divides the chunks."""

    seed: int
    name: str
    tokens: int
    chunk: int
    """Tokens per chunk."""
    window: int
    """Chunks per window."""
    direction: int = 0
    """1, -1: the source is sorted, and served in its order or in the opposite one, shuffled within
    windows; 0: it is shuffled as a whole."""
    unserved: UnservedTokens | None = None
    """Tokens of the first epoch, if this order continues another."""

    def end_row(self, epoch: int, length: int, cuts: Cuts = ()) -> int:
        """Return the row number at which an epoch ends."""
        return self.epoch(epoch, cuts).end_row(length)

    def tokens_left(self, position: Position, length: int) -> int:
        """Count the epoch's tokens that are not served before a position."""
        return self.epoch(position.epoch, position.cuts).tokens_left(position.row, length)

    def rows_left(self, position: Position, length: int, max_epochs: int) -> int:
        """Count the rows from a position until `max_epochs` epochs are consumed."""
        num_later_epochs = max_epochs - 1 - position.epoch
        if num_later_epochs < 0:
            return 0
        rows = self.end_row(position.epoch, length, position.cuts) - position.row
        if num_later_epochs:
            rows += num_later_epochs * self.end_row(position.epoch + 1, length)
        return max(rows, 0)

    def advance(self, position: Position, length: int, draws: int) -> Position:
        """Return the position `draws` rows after `position`."""
        if not draws:  # also if the source has no row of this length
            return position
        row = position.row + draws
        excess = row - self.end_row(position.epoch, length, position.cuts)
        if excess < 0:
            return replace(position, row=row)
        epochs, row = divmod(excess, max(self.end_row(position.epoch + 1, length), 1))
        return Position(epoch=position.epoch + 1 + epochs, row=row)

    def change_length(self, position: Position, length: int, new_length: int) -> Position:
        """Convert a position to rows with a new length, which serve all remaining tokens."""
        epoch, cuts = self.epoch(position.epoch, position.cuts), position.cuts
        if not epoch.ends_window(position.row, length):
            cuts = (*cuts, Cut(position.row, length))
        window = epoch.count_windows(position.row, length)
        row = epoch.window_start(window, new_length)
        return Position(epoch=position.epoch, row=row, cuts=cuts)

    def find_rows(
        self, position: Position, length: int, starts: Int64, ends: Int64
    ) -> tuple[Int64, Int64]:
        """Find the rows with an input among the tokens [starts[i], ends[i]), for all i.

        Searches the position's epoch, after the cuts. Returns pairs, sorted: i, and the row.
        """
        return tokens.find_rows(self.epoch(position.epoch, position.cuts), length, starts, ends)

    def served_spans(
        self, position: Position, length: int, draws: int
    ) -> Iterator[tuple[int, Int64]]:
        """Yield, by epoch, the token spans [start, end) of the `draws` rows after `position`."""
        while draws > 0:
            epoch = self.epoch(position.epoch, position.cuts)
            end = min(position.row + draws, max(epoch.end_row(length), position.row))
            yield position.epoch, tokens.served_spans(epoch, length, position.row, end)
            draws -= end - position.row
            position = Position(epoch=position.epoch + 1)

    def unserved_spans(self, position: Position, length: int) -> Int64:
        """List the epoch's token spans that are not served before a position."""
        epoch = self.epoch(position.epoch, position.cuts)
        return tokens.unserved_spans(epoch, position.row, length)

    def epoch(self, number: int, cuts: Cuts = ()) -> Epoch:
        epoch = Epoch(self._shuffle, number, self._pool(number))
        for cut in cuts:
            epoch = epoch.cut(*cut)
        return epoch

    @cached_property
    def _shuffle(self) -> Shuffle:
        return Shuffle(self.seed, self.name, self.chunk, self.window, self.direction)

    def _pool(self, epoch: int) -> Pool:
        if self.unserved is not None and epoch == self.unserved.position.epoch:
            return self._unserved_pool
        return self._full_pool

    @cached_property
    def _full_pool(self) -> Pool:
        num_chunks, tail = divmod(max(self.tokens - 1, 0), self.chunk)
        if self.direction < 0:  # the last tokens served are the source's first
            starts = tail + np.arange(num_chunks, dtype=np.int64) * self.chunk
            tails = np.array([[0, tail]] if tail else [], np.int64).reshape(-1, 2)
            return Pool(num_chunks, Remainder(tails), starts)
        start = num_chunks * self.chunk
        tails = np.array([[start, start + tail]], np.int64) if tail else np.empty((0, 2), np.int64)
        return Pool(num_chunks, Remainder(tails))

    @cached_property
    def _unserved_pool(self) -> Pool:
        """Full chunks, cut from the parent's unserved spans, and the shorter tails."""
        assert self.unserved is not None
        parent = self.unserved.order
        spans = parent.unserved_spans(self.unserved.position, self.unserved.length)
        if self.tokens > parent.tokens:
            # The source has grown: its former last token is the first input of the new tokens.
            spans = merge_spans(np.append(spans, [[parent.tokens - 1, self.tokens - 1]], axis=0))
        sizes = spans[:, 1] - spans[:, 0]
        counts, tail_sizes = np.divmod(sizes, self.chunk)
        chunk_in_span = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(spans[:, 0], counts) + chunk_in_span * self.chunk
        tails = np.stack([spans[:, 1] - tail_sizes, spans[:, 1]], axis=1)[tail_sizes > 0]
        return Pool(len(starts), Remainder(tails), starts)


class Draws:
    """Rows that sources serve from start positions on, with one length."""

    def __init__(
        self, orders: Sequence[SourceOrder], starts: Sequence[Position], length: int
    ) -> None:
        pairs = list(zip(orders, starts, strict=True))
        first_epochs = [order.epoch(start.epoch, start.cuts) for order, start in pairs]
        # All epochs after the first have the same rows, under other permutations.
        later_epochs = [order.epoch(start.epoch + 1) for order, start in pairs]
        self.epochs = Epochs([*first_epochs, *later_epochs], length)
        self.num_sources = len(pairs)
        self.first_epoch = np.array([start.epoch for start in starts], np.int64)
        self.first_row = np.array([start.row for start in starts], np.int64)

    def locate(self, sources: Int32 | Int64, draws: Int64) -> tuple[Int64, Int64, dict[int, Int64]]:
        """Locate draw number draws[i] of sources[i].

        Returns, by draw, the epoch and the first token; and for rows with several spans, their
        spans by index.
        """
        rows = self.first_row[sources] + draws
        later = sources + self.num_sources
        excess = rows - self.epochs.end_row[sources]
        epochs_passed, later_rows = np.divmod(excess, np.maximum(self.epochs.end_row[later], 1))
        is_later = excess >= 0
        numbers = self.first_epoch[sources] + np.where(is_later, 1 + epochs_passed, 0)
        indices, rows = np.where(is_later, later, sources), np.where(is_later, later_rows, rows)
        return numbers, *self.epochs.locate(indices, numbers, rows)
