"""Assigns the rows of a plan to sources by a fair order per era: the rows with one length.

    era        rows of 1,024          rows of 512           rows of 2,048
    owed       ─────────────────┐     ┌──────┬────────┐     ┌──────┬────────
    given      ─────────────────┘debts┘ pays ╵        └debts┘ pays ╵

Debts are exact, in tokens since row 0. An era inherits the debts from all earlier rows, with those
in continued runs, and pays them (settling.py). So a source is off by less than two longest rows
while debts are paid, then by less than a row; further changes add nothing.

- Debts are paid down to a common level. This is 0, unless the era never draws from a source with a
  debt: this debt waits for a later era, and until then the drawn sources share the opposite debt.
- Where an era ends, some sources are owed a fraction of a row. Later debts decide which of them get
  a row (outlook.py): in eras with few rows, debts could not be paid otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import compress, pairwise

import numpy as np

from ...arrays import Int32, Int64
from .fair_order import BlockCache, FairOrder
from .outlook import DebtOutlook
from .owed import Line, OwedRows
from .settling import UNIT, settle
from .slow_jobs import SlowJobs, SlowTable, assign_slow_jobs

Debts = tuple[Fraction, ...]
"""Tokens owed, by source; negative if the source is ahead."""
LoadSlowTable = Callable[[int, OwedRows, Callable[[], SlowTable]], SlowTable]
"""Loads the slow jobs of an era, by number, or computes them by the function."""


@dataclass(frozen=True, eq=False)
class Era:
    """Rows with one length."""

    row_tokens: int
    first_row: int
    debts: Debts
    """Debts at the first row."""
    before: Int64
    """Rows before the first row, by source."""
    owed: OwedRows
    order: FairOrder

    @property
    def end_row(self) -> int:
        return self.first_row + self.owed.rows

    def debts_before(self, row: int) -> Debts:
        """Compute the debts before a row in the era, or at its end."""
        num_rows = row - self.first_row
        owed, taken = self.owed.exact_rows(num_rows), self.order.counts(num_rows).tolist()
        return tuple(
            debt + (owed_rows - taken_rows) * self.row_tokens
            for debt, owed_rows, taken_rows in zip(self.debts, owed, taken, strict=True)
        )


class Eras:
    """Assigns every row to a source, as one of the source's draws: its rows, numbered from 0."""

    def __init__(
        self,
        lines: Sequence[tuple[int, Sequence[Line]]],
        debts: Debts,
        *,
        pays_debts: bool,
        load: LoadSlowTable,
    ) -> None:
        """`lines`: tokens per row, and lines, by era. `pays_debts`: true if there are earlier or
        later eras; a single era pays no debts, and leaves none."""
        owed = [OwedRows(era_lines) for _, era_lines in lines]
        outlook = DebtOutlook(
            [row_tokens for row_tokens, _ in lines], [era.exact_rows(era.rows) for era in owed]
        )
        blocks, self.eras, row = BlockCache(), list[Era](), 0
        before = np.zeros(len(debts), np.int64)
        for number, (row_tokens, era_lines) in enumerate(lines):
            paid, ranks = owed[number], None
            if pays_debts:
                if any(debts):
                    paid = OwedRows(_pay_debts(row_tokens, era_lines, paid, debts))
                taken = paid.whole_rows(paid.rows)[0].tolist()
                ranks = outlook.rank_sources(number, debts, taken)
            slow = SlowJobs(paid, load(number, paid, partial(assign_slow_jobs, paid, ranks)))
            order = FairOrder(paid, slow, blocks)
            era = Era(row_tokens, row, debts, before, owed[number], order)
            self.eras.append(era)
            before = before + order.counts(order.rows)
            row, debts = era.end_row, era.debts_before(era.end_row)
        self.bounds = np.array([0, *(era.end_row for era in self.eras)])
        """First row by era, then the number of rows."""
        self.before = np.stack([*(era.before for era in self.eras), before])
        """Rows before an era, [era, source]."""

    @property
    def rows(self) -> int:
        return int(self.bounds[-1])

    def locate(self, rows: Int64) -> tuple[Int32, Int64]:
        """Return, by row, the source, and the draw: the number of earlier rows with this source."""
        sources, draws = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        era_ids = np.searchsorted(self.bounds, rows, side="right") - 1
        for era_id in np.unique(era_ids).tolist():
            mask, era = era_ids == era_id, self.eras[era_id]
            era_sources, era_draws = era.order.locate(rows[mask] - era.first_row)
            sources[mask], draws[mask] = era_sources, era_draws + era.before[era_sources]
        return sources, draws

    def locate_draws(self, source: int, draws: Int64) -> Int64:
        """Return the rows of a source's draws; for draws after its last row, `self.rows`."""
        rows = np.full(len(draws), self.rows, np.int64)
        for era, (first_draw, end_draw) in zip(
            self.eras, pairwise(self.before[:, source]), strict=True
        ):
            mask = (draws >= first_draw) & (draws < end_draw)
            if mask.any():
                rows_in_era = era.order.locate_draws(source, draws[mask] - first_draw)
                rows[mask] = rows_in_era + era.first_row
        return rows

    def counts(self, row: int) -> Int64:
        """Count the rows [0, row) by source."""
        era = self._era_at(row)
        counts: Int64 = era.before + era.order.counts(row - era.first_row)
        return counts

    def approximate_counts(self, row: int) -> Int64:
        """Approximate `counts(row)` to within a row, without assigning a block."""
        era = self._era_at(row)
        floors, _ = era.order.owed.whole_rows(row - era.first_row)
        counts: Int64 = era.before + floors
        return counts

    def debts(self, row: int) -> list[Fraction]:
        """Compute the tokens owed after the rows [0, row), by source."""
        return list(self._era_at(row).debts_before(row))

    def _era_at(self, row: int) -> Era:
        return next(era for era in reversed(self.eras) if era.first_row <= row)


def _pay_debts(row_tokens: int, lines: Sequence[Line], owed: OwedRows, debts: Debts) -> list[Line]:
    """Change the shares in an era's lines so that they pay the debts at its start."""
    debt_rows = [int(debt * UNIT / row_tokens) for debt in debts]
    drawn = [bool(rows) for rows in owed.exact_rows(owed.rows)]
    level = sum(compress(debt_rows, drawn)) // sum(drawn)
    return settle(
        lines,
        [rows - level if is_drawn else 0 for rows, is_drawn in zip(debt_rows, drawn, strict=True)],
    )
