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

This file counts windows and rows; tokens.py finds their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...arrays import Int64
from .permutation import Name
from .remainder import Remainder

CHUNKS = -1


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

    def permutation(self, epoch: int, window: int) -> Name:
        """Return the name of the permutation of a window's rows, or all chunks (CHUNKS)."""
        return self.seed, self.name, epoch, window


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
        return -(-row // self.window_rows(length))

    def cut(self, row: int, length: int) -> Epoch:
        """Return the part of the epoch that the rows before `row` have left."""
        return Epoch(self.shuffle, self.number, self.pool, (self, Cut(row, length)))

    def ends_window(self, row: int, length: int) -> bool:
        """Return whether no window is begun and unfinished: other rows may start without a cut."""
        begun = self.windows_begun(row, length)
        in_window = begun < self.windows and row == begun * self.window_rows(length)
        return in_window or row == self.first_row(length)

    def window_rows(self, length: int) -> int:
        """Return the rows of a window but the last."""
        return self.window * (self.chunk // length)
