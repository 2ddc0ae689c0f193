"""Which sources an era serves last: those that later eras leave in debt first.

An unserved source carries its debt into the next eras, whose shares are known. A source is due by
the first era that ends with a debt of a longest row, if the source gets no further row. Suppose
that every row goes to the source due first, among all with a positive debt. Then every source is
within the longest row so far at every row, for any lengths and shares:

    No source is ahead by a row, because its debt was positive when it was served. Let a source be
    the first to fall behind by a longest row, at the end of era m; and let t be the last earlier
    era that served a source due after m (or the start). Since t, all rows went to sources due by
    m. At the end of t these had no positive debt, or they would have been served. So since t they
    received together no less than their shares. But none of them is ahead at the end of m: without
    its last row it would be behind by a longest row. So none is behind either.

Eras follow this rule for the last row by source, and pay debts before, so that most debts are far
smaller. Tests hold the sum of both below two rows (tests/mixtures/planning/test_debts.py), and
`mixtures plan` prints a plan's largest debt.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from ...arrays import Int64

UNIT = 1 << 20
"""Tokens are integers in 1/UNIT, which are faster than fractions."""


class DebtOutlook:
    """The tokens owed to sources over the eras of a plan."""

    def __init__(self, row_tokens: Sequence[int], owed: Sequence[Sequence[Fraction]]) -> None:
        """`owed`: rows owed within an era, [era][source]."""
        self._row_tokens = row_tokens
        self._longest = list(accumulate(row_tokens, max))
        """Tokens of the longest row so far, by era."""
        self._gains = [
            [int(source_rows * tokens * UNIT) for source_rows in era_rows]
            for tokens, era_rows in zip(row_tokens, owed, strict=True)
        ]

    def due_era(self, era: int, source: int, debt: int) -> int:
        """Return the era by which a source is due, if it begins `era` with a debt and gets no
        further row; the number of eras if it never is."""
        for number in range(era, len(self._gains)):
            debt += self._gains[number][source]
            if debt >= self._longest[number] * UNIT:
                return number
        return len(self._gains)

    def rank_sources(self, era: int, debts: Sequence[Fraction], taken: Sequence[int]) -> Int64:
        """Rank the sources that may get a last row in the era, after `taken` rows: earliest due
        first, then largest debt first."""
        row = self._row_tokens[era] * UNIT
        unpaid = [int(debt * UNIT) - rows * row for debt, rows in zip(debts, taken, strict=True)]
        keys = [
            (self.due_era(era, source, debt), -debt - self._gains[era][source])
            for source, debt in enumerate(unpaid)
        ]
        order = sorted(range(len(keys)), key=lambda source: keys[source])
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks
