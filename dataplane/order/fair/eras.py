"""The source of every row of a plan: a fair order for each era, the rows of one length.

    era        rows of 1,024          rows of 512           rows of 2,048
    owed       ─────────────────┐     ┌──────┬────────┐     ┌──────┬────────
    given      ─────────────────┘debts┘ pays ╵        └debts┘ pays ╵

Debts are exact, in tokens since row 0, and an era begins with those of all rows before it, also of
the runs that a plan continues. Its lines pay them (settling.py). So a source is off by less than
two of the longest rows while debts are paid, then by less than a row; no number of changes adds to
it.

- Debts are paid down to a common level. It is 0 unless a source that the era never draws from has a
  debt: that is kept for a later era, and until then the others share the contrary.
- Where an era ends, some sources are owed a part of a row. Which of them get one is decided by what
  later eras owe them (outlook.py): in eras of a few rows, debts cannot be paid otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import compress

import numpy as np

from ...arrays import Int32, Int64
from .fair_order import FairOrder, KeptBlocks
from .outlook import Outlook
from .owed import Line, Owed
from .settling import UNIT, settle
from .slow_jobs import SlowJobs, SlowTable, assign

Debts = tuple[Fraction, ...]
"""Tokens that each source is owed; negative if it has been given too many."""
Keep = Callable[[int, Owed, Callable[[], SlowTable]], SlowTable]
"""Returns the slow jobs of an era, by its number: kept ones, or those that it computes."""


@dataclass(frozen=True, eq=False)
class Era:
    """Rows of one length."""

    row_tokens: int
    first_row: int
    debts: Debts
    """At the first row."""
    before: Int64
    """Rows of each source before the first row."""
    owed: Owed
    order: FairOrder

    @property
    def end_row(self) -> int:
        return self.first_row + self.owed.rows

    def debts_at(self, row: int) -> Debts:
        """Return the debts before a row of the era, or at its end."""
        rows = row - self.first_row
        owed, taken = self.owed.exactly(rows), self.order.counts(rows).tolist()
        return tuple(
            debt + (due - count) * self.row_tokens
            for debt, due, count in zip(self.debts, owed, taken, strict=True)
        )


class Eras:
    """The source of every row, and the number of the row among that source's rows."""

    def __init__(
        self,
        lines: Sequence[tuple[int, Sequence[Line]]],
        debts: Debts,
        *,
        settles: bool,
        keep: Keep,
    ) -> None:
        """`lines`: the tokens of an era's rows, and its lines. `settles`: whether there are eras
        before or after; one that is alone pays no debts, and leaves none."""
        owed = [Owed(era_lines) for _, era_lines in lines]
        outlook = Outlook([tokens for tokens, _ in lines], [era.exactly(era.rows) for era in owed])
        blocks, self.eras, row = KeptBlocks(), list[Era](), 0
        before = np.zeros(len(debts), np.int64)
        for number, (row_tokens, era_lines) in enumerate(lines):
            paid, ranks = owed[number], None
            if settles:
                if any(debts):
                    paid = Owed(_paying(row_tokens, era_lines, paid, debts))
                ranks = outlook.ranks(number, debts, paid.at(paid.rows)[0].tolist())
            slow = SlowJobs(paid, keep(number, paid, partial(assign, paid, ranks)))
            order = FairOrder(paid, slow, blocks)
            era = Era(row_tokens, row, debts, before, owed[number], order)
            self.eras.append(era)
            before = before + order.counts(order.rows)
            row, debts = era.end_row, era.debts_at(era.end_row)
        self.edges = np.array([0, *(era.end_row for era in self.eras)])
        self.before = np.stack([*(era.before for era in self.eras), before])
        """Rows of each source before each era: [era, source]."""

    @property
    def rows(self) -> int:
        return int(self.edges[-1])

    @property
    def sources(self) -> int:
        return int(self.before.shape[1])

    def locate(self, rows: Int64) -> tuple[Int32, Int64]:
        """Return for each row its source, and the number of earlier rows of that source."""
        sources, draws = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        numbers = np.searchsorted(self.edges, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            chosen, era = numbers == number, self.eras[number]
            drawn_from, drawn = era.order.locate(rows[chosen] - era.first_row)
            sources[chosen], draws[chosen] = drawn_from, drawn + era.before[drawn_from]
        return sources, draws

    def rows_of(self, source: int, draws: Int64) -> Int64:
        """Return the row of each of a source's draws; `rows` for draws beyond the last row."""
        rows = np.full(len(draws), self.rows, np.int64)
        before = self.before[:, source]
        for number, era in enumerate(self.eras):
            chosen = (draws >= before[number]) & (draws < before[number + 1])
            if chosen.any():
                rows_in_era = era.order.rows_of(source, draws[chosen] - before[number])
                rows[chosen] = rows_in_era + era.first_row
        return rows

    def counts(self, row: int) -> Int64:
        """Return the number of rows of each source among [0, row)."""
        era = self._era_at(row)
        counts: Int64 = era.before + era.order.counts(row - era.first_row)
        return counts

    def about(self, row: int) -> Int64:
        """Return `counts(row)` to within a row, without assigning a block."""
        era = self._era_at(row)
        whole, _ = era.order.owed.at(row - era.first_row)
        counts: Int64 = era.before + whole
        return counts

    def debts(self, row: int) -> list[Fraction]:
        """Return the tokens that each source is owed after `row` rows."""
        return list(self._era_at(row).debts_at(row))

    def _era_at(self, row: int) -> Era:
        return next(era for era in reversed(self.eras) if era.first_row <= row)


def _paying(row_tokens: int, lines: Sequence[Line], owed: Owed, debts: Debts) -> list[Line]:
    """Return the lines of an era, with shares that pay the debts at its start."""
    rows = [int(debt * UNIT / row_tokens) for debt in debts]
    drawn = [bool(due) for due in owed.exactly(owed.rows)]
    level = sum(compress(rows, drawn)) // sum(drawn)
    pays = [debt - level if is_drawn else 0 for debt, is_drawn in zip(rows, drawn, strict=True)]
    return settle(lines, pays)
