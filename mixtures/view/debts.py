"""The largest debt of a plan: how far a source is from its share, in tokens since row 0.

A source's debt grows from row to row until the source is served. So the largest are those of the
sources that a row serves, before and after it, and those at the end of the rows of one length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.order.stream import LengthSpan, Stream

ALL_ROWS = 1 << 16
"""Rows of a plan of which all are examined. Of others, those at the ends of the rows of a length
are: a debt changes most there, and is below a row of that length in between."""


@dataclass(frozen=True, kw_only=True)
class WorstDebt:
    """The largest debt among the rows that were examined."""

    source: str
    tokens: float
    """Tokens that the source is owed; negative if it has been given too many."""
    row: int
    """The row before which it is."""
    longest_rows: float
    """The debt in rows of the longest length so far."""
    rows_examined: int


def worst_debt(stream: Stream) -> WorstDebt:
    """Return the largest debt of a plan, in rows of the longest length so far."""
    plan, longest, examined = stream.plan, 0, 0
    worst: tuple[float, Fraction, int, int] = (-1.0, Fraction(0), 0, plan.first_row)
    for span in stream.spans:
        longest = max(longest, span.length)
        rows = {span.first_row, span.end_row}
        for part in _examined(span, ALL_ROWS // len(stream.spans), plan.rows <= ALL_ROWS):
            examined += len(part)
            rows.add(_furthest(stream, span, part))
        for row in sorted(rows):
            debts = stream.debts(row)
            source = max(range(len(debts)), key=lambda source: abs(debts[source]))
            in_rows = abs(float(debts[source] / longest))
            if in_rows > worst[0]:
                worst = (in_rows, debts[source], source, row)
    in_rows, debt, source, row = worst
    return WorstDebt(
        source=plan.sources[source].name,
        tokens=float(debt),
        row=row,
        longest_rows=in_rows,
        rows_examined=examined,
    )


def _examined(span: LengthSpan, limit: int, every: bool) -> Iterator[Int64]:
    """Yield the rows of a span that are examined."""
    first, end = span.first_row, span.end_row
    if every or end - first <= limit:
        yield np.arange(first, end)
    else:
        yield np.arange(first, first + limit // 2)
        yield np.arange(end - limit // 2, end)


def _furthest(stream: Stream, span: LengthSpan, rows: Int64) -> int:
    """Return the row before which a source that rows serve is furthest from its share.

    In floating point: debts are small beside the rounding errors of no plan below 2 ** 52 tokens.
    """
    plan = stream.plan
    sources, draws = stream.assignment.locate(rows - plan.first_row)
    debts = np.array([float(debt) for debt in stream.debts(span.first_row)]) / span.length
    owed = np.zeros((len(rows), 2))
    for phase in plan.phases:
        if not span.first_row <= phase.first_row < span.end_row:
            continue
        first = phase.first_row
        for stretch in phase.stretches:
            start = np.array(stretch.weights, float) / sum(stretch.weights)
            to = np.array(stretch.to or stretch.weights, float) / sum(stretch.weights)
            chosen = (rows >= first) & (rows < first + stretch.rows)
            of = sources[chosen]
            for side in (0, 1):
                n = rows[chosen] + side - first
                owed[chosen, side] = (
                    debts[of] + (start[of] + (to - start)[of] * n / (2 * stretch.rows)) * n
                )
            debts = debts + (start + to) / 2 * stretch.rows
            first += stretch.rows
    taken = draws - span.counts[sources]
    before, after = np.abs(owed[:, 0] - taken), np.abs(owed[:, 1] - taken - 1)
    place = int(np.argmax(np.maximum(before, after)))
    return int(rows[place]) + int(after[place] > before[place])
