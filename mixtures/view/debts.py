"""The largest debt in a plan: a source's distance from its share, in tokens since row 0.

A source's debt grows from row to row until the source is served. So debts peak just before and
after a row, for the source that it serves, and at the end of the rows with one length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.order.steered import decided_phases
from ...dataplane.order.stream import LengthSpan, Stream

MAX_EXAMINED_ROWS = 1 << 16
"""In larger plans, only rows near a change of length are examined: debts change most there, and
stay below a row in between."""


@dataclass(frozen=True, kw_only=True)
class WorstDebt:
    """The largest debt among the examined rows."""

    source: str
    tokens: float
    """Tokens owed to the source; negative if it is ahead."""
    row: int
    """The debt stands before this row."""
    longest_rows: float
    """The debt in rows with the longest length so far."""
    rows_examined: int


def find_worst_debt(stream: Stream) -> WorstDebt:
    """Find a plan's largest debt, measured in rows with the longest length so far."""
    plan, longest, examined = stream.plan, 0, 0
    worst: tuple[float, Fraction, int, int] = (-1.0, Fraction(0), 0, plan.first_row)
    for span in stream.spans:
        longest = max(longest, span.length)
        rows = {span.first_row, span.end_row}
        max_rows = span.end_row - span.first_row
        if plan.rows > MAX_EXAMINED_ROWS:
            max_rows = MAX_EXAMINED_ROWS // len(stream.spans)
        for block in _examined_rows(span, max_rows):
            examined += len(block)
            rows.add(_find_furthest_row(stream, span, block))
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


def _examined_rows(span: LengthSpan, max_rows: int) -> Iterator[Int64]:
    """Yield up to about `max_rows` rows at both ends of a span."""
    first_row, end_row = span.first_row, span.end_row
    if end_row - first_row <= max_rows:
        yield np.arange(first_row, end_row)
    else:
        yield np.arange(first_row, first_row + max_rows // 2)
        yield np.arange(end_row - max_rows // 2, end_row)


def _find_furthest_row(stream: Stream, span: LengthSpan, rows: Int64) -> int:
    """Find the row before which a source that `rows` serve is furthest from its share.

    In floating point: below 2 ** 52 tokens, debts exceed the rounding errors.
    """
    plan = stream.plan
    sources, draws = stream.assignment.locate(rows - plan.first_row)
    debts = np.array([float(debt) for debt in stream.debts(span.first_row)]) / span.length
    owed = np.zeros((len(rows), 2))
    for phase in decided_phases(plan):
        if not span.first_row <= phase.first_row < span.end_row:
            continue
        first_row = phase.first_row
        for stretch in phase.stretches:
            start = np.array(stretch.weights, float) / sum(stretch.weights)
            end = np.array(stretch.to or stretch.weights, float) / sum(stretch.weights)
            chosen = (rows >= first_row) & (rows < first_row + stretch.rows)
            served = sources[chosen]
            for side in (0, 1):  # before and after the row
                n = rows[chosen] + side - first_row
                average = start[served] + (end - start)[served] * n / (2 * stretch.rows)
                owed[chosen, side] = debts[served] + average * n
            debts = debts + (start + end) / 2 * stretch.rows
            first_row += stretch.rows
    taken = draws - span.counts[sources]
    before, after = np.abs(owed[:, 0] - taken), np.abs(owed[:, 1] - taken - 1)
    index = int(np.argmax(np.maximum(before, after)))
    return int(rows[index]) + int(after[index] > before[index])
