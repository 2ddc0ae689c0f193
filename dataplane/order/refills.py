"""Rows of a source in the place of others: substitutes that the plan would not serve otherwise.

draw        0 1 2 3 4 5 6 7 │ 8 9        the plan draws 8 rows of the source
refills         │     └───────► 9        drawn at 2: row 8, at 5: row 9
                └─────────────► 8
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Int64

Refill = tuple[int, int]
"""A draw, and the draw whose row it gets; both count the plan's rows of the source."""


class Refills:
    """The refills of a source, in both directions."""

    def __init__(self, refills: Sequence[Refill]) -> None:
        """`refills` are sorted by both numbers."""
        self.draws, self.substitutes = np.array(refills, np.int64).reshape(-1, 2).T

    @property
    def end_draw(self) -> int:
        """One past the last draw whose row is served."""
        return int(self.substitutes[-1]) + 1

    def substitute(self, draws: Int64) -> Int64:
        """Return the draws whose rows are served at these draws."""
        return _replace(draws, self.draws, self.substitutes)

    def find_draws(self, served: Int64, num_drawn: int) -> tuple[Int64, Int64]:
        """Return the draws at which the rows of these draws are served, and their indices: a row
        that was replaced, or that is no substitute, is not served."""
        is_served = ~_isin(served, self.draws)
        is_served &= (served < num_drawn) | _isin(served, self.substitutes)
        indices = np.flatnonzero(is_served)
        return _replace(served[indices], self.substitutes, self.draws), indices


def _isin(numbers: Int64, sorted_numbers: Int64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    index = np.minimum(sorted_numbers.searchsorted(numbers), len(sorted_numbers) - 1)
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = sorted_numbers[index] == numbers
    return result


def _replace(numbers: Int64, keys: Int64, values: Int64) -> Int64:
    """Replace each of the sorted keys by its value."""
    index = np.minimum(keys.searchsorted(numbers), len(keys) - 1)
    return np.where(keys[index] == numbers, values[index], numbers)
