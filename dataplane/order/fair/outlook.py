"""Choose the sources that get an era's last rows: those whose debts would grow too large first.

At an era's end, some sources are owed a fraction of a row. A source without a row carries its debt
into the next eras, whose shares are known. It is due by the first era at whose end its debt would
reach the longest row so far, if it got no further row.

Suppose that every row goes to the source that is due first, among those with a positive debt. Then
no source is ever ahead or behind by the longest row so far, for any lengths and shares:

    No source is ahead by a row, because its debt was positive when it was served. Suppose that a
    source falls behind by a longest row, for the first time at the end of era m. Let D be the
    sources due by m, and t the last era before m that served a source outside D (or the start).
    At the end of t, no source in D had a positive debt, or it would have been served instead. Since
    t, all rows went to D, so its sources together received no less than their shares, and their
    debts at the end of m sum to 0 or less. But none of these debts is negative: without its last
    row, the source would be behind by a longest row. So all are 0, and no source is behind.

Eras follow this rule for each source's last row, and pay debts before, so that most debts are far
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
"""Units per token. Debts are integers in units here, which are faster than fractions."""


class DebtOutlook:
    """How the debts to sources grow over the eras of a plan."""

    def __init__(self, row_tokens: Sequence[int], owed: Sequence[Sequence[Fraction]]) -> None:
        """`row_tokens` [era]: tokens per row. `owed` [era][source]: rows owed for the era alone."""
        self._row_tokens = row_tokens
        self._longest = list(accumulate(row_tokens, max))
        """[era] Tokens of the longest row so far."""
        self._gains = [
            [int(source_rows * tokens * UNIT) for source_rows in era_rows]
            for tokens, era_rows in zip(row_tokens, owed, strict=True)
        ]
        """[era][source] Units owed for the era alone."""

    def due_era(self, era: int, source: int, debt: int) -> int:
        """Return the era by which a source is due if it begins `era` with `debt` units and gets no
        further row; the number of eras if it never is due."""
        for later_era in range(era, len(self._gains)):
            debt += self._gains[later_era][source]
            if debt >= self._longest[later_era] * UNIT:
                return later_era
        return len(self._gains)

    def rank_sources(self, era: int, debts: Sequence[Fraction], taken: Sequence[int]) -> Int64:
        """Return [source] ranks for the era's last rows: earliest due first, then largest debt.

        `debts`: tokens owed at the era's start; `taken`: rows that the era gives before.
        """
        row_units = self._row_tokens[era] * UNIT
        unpaid = [
            int(debt * UNIT) - rows * row_units for debt, rows in zip(debts, taken, strict=True)
        ]
        keys = [
            (self.due_era(era, source, debt), -debt - self._gains[era][source])
            for source, debt in enumerate(unpaid)
        ]
        order = sorted(range(len(keys)), key=lambda source: keys[source])
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks
