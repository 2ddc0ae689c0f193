"""Best-fit decreasing by counts, beside the algorithm as it is written in books."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.tokenize.views.best_fit import best_fit


def piece_by_piece(lengths: list[int], capacity: int) -> list[int]:
    """Return the rooms that are left, in order."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting, default=capacity)
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    return sorted(rooms)


@given(
    capacity=st.integers(1, 60),
    shares=st.lists(st.floats(0, 1, exclude_max=True), max_size=120),
    count=st.integers(1, 3),
)
def test_bins_are_those_of_the_algorithm(capacity: int, shares: list[float], count: int) -> None:
    lengths = [1 + int(share * capacity) for share in shares] * count
    bins, used, _ = best_fit(np.bincount(lengths, minlength=capacity + 1), capacity)
    filled = np.bincount(bins, np.sort(lengths)[::-1], used).astype(int)
    assert len(filled) == used
    assert sorted((capacity - filled).tolist()) == piece_by_piece(lengths, capacity)


def test_it_beats_filling_bins_in_order() -> None:
    lengths = [4, 4, 4, 6, 6, 6, 7, 3]
    _, used, _ = best_fit(np.bincount(lengths, minlength=11), 10)
    bins, room = 0, 0
    for length in lengths:
        if room < length:
            bins, room = bins + 1, 10
        room -= length
    assert (used, bins) == (4, 5)
