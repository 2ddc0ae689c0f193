"""An epoch: permuted chunks, then the remainder, in windows with permuted rows.

    chunk 17 ── chunk 3 ── chunk 40 │ chunk 8 ── … ── the last chunks ── the remainder
    └──────── a window ───────────┘ └─ the next …    └──── the last window ──────────┘
    row 9, row 2, row 31, …                           its rows in a permuted order

A chunk's tokens are a multiple of every sequence length in the plan, so rows of another length can
start at any window without cutting a row in two. The remainder is what full chunks leave over: at
first, the tail after the last of them.

Where the row length changes within a window, the epoch is cut: rows with the new length start at
the next window, and the tokens that the begun window has not served join the remainder. So after
any number of cuts an epoch serves every token once, except less than a row at its end. A cut is
described by its row number and the old length alone.

A source that is sorted by a field keeps its chunks in order, rising or falling (`direction`): its
rows are permuted within a window all the same.

This file counts windows and rows; tokens.py finds their tokens. All `length` are tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...arrays import Int64
from .permutation import PermutationName
from .remainder import Remainder

ALL_CHUNKS = -1
"""Stands for the window's number in the name of the chunks' permutation."""


class Cut(NamedTuple):
    """A change of the row length."""

    row: int
    """First row that is not served, counted in rows with the old length."""
    length: int
    """Old length."""


@dataclass(frozen=True, eq=False, slots=True)
class Pool:
    """An epoch's tokens: full chunks and shorter tails."""

    num_chunks: int
    """Full chunks."""
    tails: Remainder
    starts: Int64 | None = None
    """[num_chunks] First token of each full chunk; None if they are contiguous from token 0."""


@dataclass(frozen=True, eq=False, slots=True)
class Shuffle:
    """Names the permutations of a source's chunks, and of the rows in a window."""

    seed: int
    name: str
    """The source's name."""
    chunk: int
    """Tokens per chunk."""
    window: int
    """Chunks per window."""
    direction: int = 0
    """0: chunks are permuted. 1, -1: they keep the source's order, or have the opposite one."""

    def permutation_name(self, epoch: int, window: int) -> PermutationName:
        """Name the permutation of a window's rows or, for ALL_CHUNKS, of the epoch's chunks."""
        return self.seed, self.name, epoch, window


class Epoch:
    """The rows of an epoch, or those that remain after a cut.

    After a cut, rows are numbered as if all windows before them had been served in the new length:
    the first row is `first_row(length)`, not 0.
    """

    def __init__(
        self, shuffle: Shuffle, number: int, pool: Pool, uncut: tuple[Epoch, Cut] | None = None
    ) -> None:
        """`uncut`: the epoch before its last cut, and this cut; None for a whole epoch."""
        self.shuffle, self.number, self.pool, self.uncut = shuffle, number, pool, uncut
        self.chunk, self.window = shuffle.chunk, shuffle.window
        self.num_windows = max(1, -(-pool.num_chunks // self.window))
        """Windows with full chunks; the last one includes the remainder."""
        self.first_window, self.cuts = 0, tuple[Cut, ...]()
        self.tokens = pool.num_chunks * self.chunk + pool.tails.tokens
        """Tokens left to serve: all, or those after the last cut."""
        if uncut is not None:
            epoch, cut = uncut
            self.first_window, self.cuts = epoch.count_windows(*cut), (*epoch.cuts, cut)
            self.tokens = epoch.tokens_left(*cut)
        chunks_left = pool.num_chunks - min(self.first_window * self.window, pool.num_chunks)
        self.remainder_tokens = self.tokens - chunks_left * self.chunk
        if self.first_window < self.num_windows:
            self.last_window = self.num_windows - 1
            """Number of the last window, for the name of its permutation."""
            self.chunks_before_last_window = self.last_window * self.window
        else:  # cut in the last window: the remainder is a new window, with a new number
            self.last_window = self.num_windows + len(self.cuts)
            self.chunks_before_last_window = pool.num_chunks

    def first_row(self, length: int) -> int:
        return self.window_start(self.first_window, length)

    def end_row(self, length: int) -> int:
        """Return one past the last row: the rows of all chunks, then those of the remainder."""
        return self.pool.num_chunks * (self.chunk // length) + self.remainder_tokens // length

    def window_start(self, window: int, length: int) -> int:
        """Return a window's first row; the remainder's, if `window` is `num_windows`."""
        return min(window * self.window, self.pool.num_chunks) * (self.chunk // length)

    def window_rows(self, length: int) -> int:
        """Count the rows in a window other than the last."""
        return self.window * (self.chunk // length)

    def tokens_left(self, row: int, length: int) -> int:
        """Count the tokens that rows before `row` leave."""
        return self.tokens - (row - self.first_row(length)) * length

    def count_windows(self, row: int, length: int) -> int:
        """Count the windows that have begun before `row`."""
        if row <= self.first_row(length):
            return self.first_window
        if row > self.chunks_before_last_window * (self.chunk // length):
            return self.num_windows
        return -(-row // self.window_rows(length))

    def ends_window(self, row: int, length: int) -> bool:
        """Return True if a window ends before `row`, so that a new length needs no cut."""
        windows = self.count_windows(row, length)
        at_boundary = windows < self.num_windows and row == windows * self.window_rows(length)
        return at_boundary or row == self.first_row(length)

    def cut(self, row: int, length: int) -> Epoch:
        """Return the epoch after a cut before `row`, with all tokens that are not yet served."""
        return Epoch(self.shuffle, self.number, self.pool, (self, Cut(row, length)))
