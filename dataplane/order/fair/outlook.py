"""Which sources an era serves last: those that later eras will owe most.

Whoever is not served keeps a debt for the next eras, and their shares are known. A source is due by
the first era at whose end it would be owed a longest row, if it got no further row. If every row
went to the source that is due first, among those that are owed something at all, every source would
be within the longest row so far at every row, for any lengths and shares:

    No source is ahead by a row, because it was owed something when it was served. Let a source be
    the first that is behind by a longest row, at the end of era m; and let t be the last era before
    in which a source was served that is due after m (or the start). Since t, all rows went to
    sources that are due by m. At the end of t, these were owed nothing, or they would have been
    served. So since t they were given no less than they were owed, together. But none of them is
    ahead at the end of m: without its last row it would be behind by a longest row. So none is
    behind either.

Eras follow this rule for the last row of each source, and pay debts before, so that most are far
below that. Tests hold the sum of both below two rows (tests/mixtures/planning/test_debts.py), and
`mixtures plan` prints the largest debt of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from ...arrays import Int64

UNIT = 1 << 20
"""Tokens are counted in parts of 1/UNIT: integers are faster than fractions."""


class Outlook:
    """What the sources are owed in the eras of a plan."""

    def __init__(self, row_tokens: Sequence[int], owed: Sequence[Sequence[Fraction]]) -> None:
        """`owed`: the rows that each era owes to each source."""
        self._row_tokens = row_tokens
        self._longest = list(accumulate(row_tokens, max))
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
            if debt >= self._longest[number] * UNIT:
                return number
        return len(self._gains)

    def ranks(self, era: int, debts: Sequence[Fraction], taken: Sequence[int]) -> Int64:
        """Return the order in which sources that have `taken` rows in the era get one more: first
        those that are due first, then those that are owed most."""
        tokens = self._row_tokens[era] * UNIT
        unpaid = [int(debt * UNIT) - rows * tokens for debt, rows in zip(debts, taken, strict=True)]
        keys = [
            (self.due(era, source, debt), -debt - self._gains[era][source])
            for source, debt in enumerate(unpaid)
        ]
        order = sorted(range(len(keys)), key=lambda source: keys[source])
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks
