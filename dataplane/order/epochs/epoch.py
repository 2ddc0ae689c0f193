"""An epoch: permuted chunks, then the remainder, in windows with permuted rows.

    chunk 17 ── chunk 3 ── chunk 40 │ chunk 8 ── … ── the last chunks ── the remainder
    └──────── a window ───────────┘ └─ the next …    └──── the last window ──────────┘
    row 9, row 2, row 31, …                           its rows in a permuted order

A chunk's tokens are a multiple of every sequence length in the plan, so rows of another length can
start at any window without cutting a row in two. The remainder is every token outside the windows
of full chunks: at first the tail after the last full chunk.

Where the row length changes within a window, the epoch is cut: rows with the new length start at
the next window, and the begun window's unserved tokens join the remainder. So an epoch serves every
token once, except less than a row at the end, after any number of cuts; and a cut is known from its
row number and length alone.

This file counts windows and rows; tokens.py finds their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...arrays import Int64
from .permutation import PermutationName
from .remainder import Remainder

ALL_CHUNKS = -1
"""Replaces the window's number in the name for the chunks' permutation."""


class Cut(NamedTuple):
    """A change of the row length before row `row`, counted in rows with the old length `length`."""

    row: int
    length: int


@dataclass(frozen=True, eq=False, slots=True)
class Pool:
    """An epoch's tokens: full chunks and shorter tails."""

    num_chunks: int
    tails: Remainder
    starts: Int64 | None = None
    """First token by full chunk; None if these are contiguous from token 0."""


@dataclass(frozen=True, eq=False, slots=True)
class Shuffle:
    """The permutations for a source's chunks, and for the rows in a window."""

    seed: int
    name: str
    chunk: int
    """Tokens per chunk."""
    window: int
    """Chunks per window."""

    def permutation_name(self, epoch: int, window: int) -> PermutationName:
        """Name the permutation for a window's rows, or for all chunks (ALL_CHUNKS)."""
        return self.seed, self.name, epoch, window


class Epoch:
    """The rows of an epoch, or the rows after a cut.

    Row numbers count whole windows from the epoch's start, as if all rows before the cut had the
    new length.
    """

    def __init__(
        self, shuffle: Shuffle, number: int, pool: Pool, uncut: tuple[Epoch, Cut] | None = None
    ) -> None:
        """`uncut`: the epoch before its last cut, and this cut."""
        self.shuffle, self.number, self.pool, self.uncut = shuffle, number, pool, uncut
        self.chunk, self.window = shuffle.chunk, shuffle.window
        self.num_windows = max(1, -(-pool.num_chunks // self.window))
        """Windows with full chunks; the last one includes the remainder."""
        self.first_window, self.cuts = 0, tuple[Cut, ...]()
        self.tokens = pool.num_chunks * self.chunk + pool.tails.tokens
        """Tokens after the cuts."""
        if uncut is not None:
            epoch, cut = uncut
            self.first_window, self.cuts = epoch.count_windows(*cut), (*epoch.cuts, cut)
            self.tokens = epoch.tokens_left(*cut)
        self.chunks_left = pool.num_chunks - min(self.first_window * self.window, pool.num_chunks)
        # After a cut in the last window, the remainder is a window with a number of its own.
        is_remainder = self.first_window >= self.num_windows
        self.last_window = (
            self.num_windows + len(self.cuts) if is_remainder else self.num_windows - 1
        )
        self.chunks_before_last_window = (
            pool.num_chunks if is_remainder else (self.num_windows - 1) * self.window
        )

    def end_row(self, length: int) -> int:
        num_rows = self.pool.num_chunks * (self.chunk // length)
        if self.uncut is None:
            return num_rows + self.pool.tails.num_rows(length)
        return num_rows + (self.tokens - self.chunks_left * self.chunk) // length

    def first_row(self, length: int) -> int:
        return self.window_start(self.first_window, length)

    def window_start(self, window: int, length: int) -> int:
        """Return a window's first row; after all windows, the remainder's."""
        return min(window * self.window, self.pool.num_chunks) * (self.chunk // length)

    def tokens_left(self, row: int, length: int) -> int:
        """Count the tokens that are not served before `row`."""
        return self.tokens - (row - self.first_row(length)) * length

    def count_windows(self, row: int, length: int) -> int:
        """Count the windows that are begun before `row`."""
        if row <= self.first_row(length):
            return self.first_window
        if row > self.chunks_before_last_window * (self.chunk // length):
            return self.num_windows
        return -(-row // self.window_rows(length))

    def cut(self, row: int, length: int) -> Epoch:
        """Cut the epoch before `row`; returns the part with all unserved tokens."""
        return Epoch(self.shuffle, self.number, self.pool, (self, Cut(row, length)))

    def ends_window(self, row: int, length: int) -> bool:
        """Tell whether no window is half served before `row`: a new length needs no cut."""
        windows = self.count_windows(row, length)
        at_boundary = windows < self.num_windows and row == windows * self.window_rows(length)
        return at_boundary or row == self.first_row(length)

    def window_rows(self, length: int) -> int:
        """Count the rows in a window other than the last."""
        return self.window * (self.chunk // length)
