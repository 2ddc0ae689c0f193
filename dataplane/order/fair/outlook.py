"""Which source an era serves at its end, and how many rows each gets in an era too short to pay.

Whoever is served keeps a debt for the next eras, and their shares are known. A source is due by the
first era at whose end it would be owed a longest row, or more, if it got no further row. Serving
those that are due first, among those that are owed something at all, keeps every source within the
longest row so far at the end of every era, for any row lengths and shares:

    No source is ahead by a row, because it was owed something when it was served. Let a source be
    the first that is behind by a longest row, at the end of era m; and let t be the last era before
    in which a source was served that is due after m (or the start). Since t, all rows went to
    sources that are due by m. At the end of t, these were owed nothing, or they would have been
    served. So since t they were given no less than they were owed, together. But none of them is
    ahead at the end of m: without its last row it would be behind by a longest row. So none is
    behind either.

Debts at the start of a plan, of runs before it, add to the bound at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from ...arrays import Int64

UNIT = 1 << 20
"""Tokens are counted in parts of 1/UNIT: integers are faster than fractions."""

Tokens = list[int]
"""Tokens by source, in parts of 1/UNIT."""


class Outlook:
    """What the sources are owed in the eras of a plan."""

    def __init__(self, row_tokens: Sequence[int], owed: Sequence[Sequence[Fraction]]) -> None:
        """`owed`: the rows that each era owes to each source."""
        self.row_tokens, self.owed = row_tokens, owed
        self.longest = list(accumulate(row_tokens, max))
        """Tokens of the longest row so far, by era."""
        self._gains = [
            [int(due * tokens * UNIT) for due in rows]
            for tokens, rows in zip(row_tokens, owed, strict=True)
        ]

    def due(self, era: int, source: int, debt: int) -> int:
        """Return the era by which a source that starts `era` with a debt is due, if it gets no more
        rows; one past the last if it never is."""
        for number in range(era, len(self._gains)):
            debt += self._gains[number][source]
            if debt >= self.longest[number] * UNIT:
                return number
        return len(self._gains)

    def ranks(self, era: int, debts: Sequence[Fraction], taken: Sequence[int]) -> Int64:
        """Return the order in which sources that have `taken` rows in the era get one more: first
        those that are due first, then those that are owed most."""
        tokens = self.row_tokens[era] * UNIT
        left = [int(debt * UNIT) - rows * tokens for debt, rows in zip(debts, taken, strict=True)]
        keys = [
            (self.due(era, source, debt), -debt - self._gains[era][source])
            for source, debt in enumerate(left)
        ]
        order = sorted(range(len(keys)), key=lambda source: keys[source])
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks
