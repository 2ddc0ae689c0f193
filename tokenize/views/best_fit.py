"""Best-fit decreasing: pack pieces, counted by length, into bins with one capacity.

Pieces are placed longest first, into the fullest bin with enough space or into a new bin. Pieces of
one length are interchangeable, and so are bins with equal space: they are placed together, so the
work grows with the number of different lengths and spaces, not with the pieces.
"""

from __future__ import annotations

import numpy as np

from ...dataplane.arrays import Int64


def best_fit(counts: Int64, capacity: int, min_opening: int = 1) -> tuple[Int64, int, Int64]:
    """Pack `counts[n]` pieces of length n, for every n, into bins of `capacity`.

    Pieces shorter than `min_opening` open no bin: some may stay behind. Return the bin of each
    packed piece, longest piece first; the number of bins; and the number of packed pieces by
    length.
    """
    open_bins = _BinsBySpace(capacity)
    packed = np.zeros_like(counts)
    lengths = np.flatnonzero(counts[1 : capacity + 1])[::-1] + 1
    for length in lengths.tolist():
        num_pieces = int(counts[length])
        while num_pieces and (length >= min_opening or open_bins.has_space(length)):
            num_pieces = open_bins.place(length, num_pieces)
        packed[length] = counts[length] - num_pieces
    return np.array(open_bins.bin_of_piece, np.int64), open_bins.bins, packed


class _BinsBySpace:
    """Bins, grouped by their free space."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bins = 0
        self.bin_of_piece: list[int] = []
        """Bin numbers by placed piece, in placement order."""
        self._by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._spaces = 0
        """A set, as bits: bit s is set if a bin has s free."""

    def has_space(self, length: int) -> bool:
        """Return True if a piece of this length fits into an open bin."""
        return self._spaces >> length > 0

    def place(self, length: int, num_pieces: int) -> int:
        """Place pieces of a length into the fullest bins that fit one; return how many of the
        `num_pieces` pieces remain."""
        fitting = self._spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            bins = self._by_space[space]
        else:
            space = self.capacity
            count = -(-num_pieces // (space // length))
            bins = self._by_space[space] = list(range(self.bins, self.bins + count))
            self.bins += count
            self._spaces |= 1 << space
        # After a piece, its bin is the fullest that fits the next one: it takes all that it can.
        per_bin = space // length
        num_full = min(num_pieces // per_bin, len(bins))
        if num_full:
            self._move(space, num_full, length, per_bin)
            num_pieces -= num_full * per_bin
        if num_pieces and bins and num_pieces < per_bin:
            self._move(space, 1, length, num_pieces)
            num_pieces = 0
        return num_pieces

    def _move(self, space: int, count: int, length: int, per_bin: int) -> None:
        """Place `per_bin` pieces into each of `count` bins with this space."""
        bins = self._by_space[space]
        moved = bins[-count:]
        del bins[-count:]
        if not bins:
            self._spaces ^= 1 << space
        remaining = space - per_bin * length
        if remaining:
            if not self._by_space[remaining]:
                self._spaces |= 1 << remaining
            self._by_space[remaining] += moved
        self.bin_of_piece += moved * per_bin
