"""Best-fit decreasing: pieces into bins of one capacity, by the counts of their lengths.

Each piece, the longest first, goes into the fullest bin that still has room for it, or opens a new
one. Pieces of one length are interchangeable, and so are bins with equal room: they are placed
together, so the work grows with the number of different lengths and rooms, not with the pieces.
"""

from __future__ import annotations

import numpy as np

from ...dataplane.arrays import Int64


def best_fit(counts: Int64, capacity: int) -> tuple[Int64, int]:
    """Pack `counts[n]` pieces of each length n up to `capacity`.

    Return the bin of each piece, the longest first, and the number of bins.
    """
    rooms = _Rooms(capacity)
    lengths = np.flatnonzero(counts[1 : capacity + 1])[::-1] + 1
    for length in lengths.tolist():
        left = int(counts[length])
        while left:
            left = rooms.place(length, left)
    return np.array(rooms.placed, np.int64), rooms.bins


class _Rooms:
    """Bins by the room that they have left."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bins = 0
        self.placed: list[int] = []
        """The bin of each piece that was placed."""
        self._by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._some = 0
        """Bit r is set if there is a bin with room r."""

    def place(self, length: int, left: int) -> int:
        """Place pieces of a length into bins with the least room for it; return how many of the
        `left` pieces remain."""
        fitting = self._some >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            bins = self._by_room[room]
        else:
            room = self.capacity
            count = -(-left // (room // length))
            bins = self._by_room[room] = list(range(self.bins, self.bins + count))
            self.bins += count
            self._some |= 1 << room
        # After a piece, its bin is the fullest that fits the next one: it takes all that it can.
        each = room // length
        full = min(left // each, len(bins))
        if full:
            self._move(room, full, length, each)
            left -= full * each
        if left and bins and left < each:
            self._move(room, 1, length, left)
            left = 0
        return left

    def _move(self, room: int, count: int, length: int, each: int) -> None:
        """Place `each` pieces of a length into each of `count` bins with this room."""
        bins = self._by_room[room]
        moved = bins[-count:]
        del bins[-count:]
        if not bins:
            self._some ^= 1 << room
        rest = room - each * length
        if rest:
            if not self._by_room[rest]:
                self._some |= 1 << rest
            self._by_room[rest] += moved
        self.placed += moved * each
