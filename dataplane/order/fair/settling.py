"""Lines that pay debts: at the start of an era, sources ahead cede rows to sources behind.

A source can cede at most the rows that it is owed. So debts are paid over a few rows first, then
over segments that grow by a factor of four. Shares are never negative, so the fair order is within
a row of these lines at every row: while debts are paid, a source is off by less than its debt and a
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .owed import Line

UNIT = 1 << 32
"""Rows are integers in 1/UNIT."""
NEGLIGIBLE = UNIT >> 16
"""A debt that is left for the next era."""
MIN_TOTAL = 1 << 44
"""Minimum sum of the integer shares in a segment that pays."""
FIRST_ROWS = 2
GROWTH = 4

Rows = list[int]
"""Rows by source, in 1/UNIT."""


def settle(lines: Sequence[Line], debts: Rows) -> list[Line]:
    """Change lines so that they pay debts with sum 0.

    A source is paid while it has a share; or at any time, if later lines give it none.
    """
    settled = []
    for number, line in enumerate(lines):
        later_sources = {
            source
            for later_line in lines[number + 1 :]
            for source, shares in enumerate(zip(later_line.start, later_line.end, strict=True))
            if any(shares)
        }
        first, rows = 0, FIRST_ROWS
        while first < line.rows and max(debts) > NEGLIGIBLE:
            segment = slice_line(line, first, min(first + rows, line.rows))
            segment, debts = _pay(segment, debts, later_sources)
            settled.append(segment)
            first, rows = first + segment.rows, rows * GROWTH
        if first < line.rows:
            settled.append(slice_line(line, first, line.rows))
    return settled


def slice_line(line: Line, first: int, end: int) -> Line:
    """Slice the rows [first, end) out of a line."""
    if line.start == line.end or (first, end) == (0, line.rows):
        return Line(end - first, line.start, line.end)

    def interpolate(row: int) -> tuple[int, ...]:
        return tuple(
            start_share * (line.rows - row) + end_share * row
            for start_share, end_share in zip(line.start, line.end, strict=True)
        )

    return Line(end - first, interpolate(first), interpolate(end))


def _pay(segment: Line, debts: Rows, later_sources: set[int]) -> tuple[Line, Rows]:
    """Change the shares of a segment so that they pay debts; also returns the remaining debts.

    `later_sources` have a share in later lines.
    """
    total = sum(segment.start)
    owed = [
        (start + end) * segment.rows * UNIT // (2 * total)
        for start, end in zip(segment.start, segment.end, strict=True)
    ]
    ceded = [min(max(-debt, 0), rows) for debt, rows in zip(debts, owed, strict=True)]
    gained = [
        max(debt, 0) if owed[source] or source not in later_sources else 0
        for source, debt in enumerate(debts)
    ]
    ceded = _cut_to_total(ceded, min(sum(ceded), sum(gained)))
    gained = _cut_to_total(gained, sum(ceded))
    if not any(gained):
        return segment, debts
    scale = max(1, MIN_TOTAL // total)
    start, end = (
        _move_shares([share * scale for share in shares], owed, ceded, gained)
        for shares in (segment.start, segment.end)
    )
    remaining = [debt + rows - gain for debt, rows, gain in zip(debts, ceded, gained, strict=True)]
    return Line(segment.rows, start, end), remaining


def _cut_to_total(amounts: Rows, total: int) -> Rows:
    """Cut the same level off all amounts, such that about `total` remains."""
    descending = sorted(amounts, reverse=True)
    for count, total_above in enumerate(accumulate(descending), start=1):
        next_amount = descending[count] if count < len(descending) else 0
        if total_above - count * next_amount >= total:
            break
    level = -((total - total_above) // count)  # rounded up
    return [max(amount - level, 0) for amount in amounts]


def _move_shares(shares: Sequence[int], owed: Rows, ceded: Rows, gained: Rows) -> tuple[int, ...]:
    """Take the fraction `ceded` / `owed` off every share, and add it in proportion to `gained`."""
    taken = [
        share * ceded_rows // owed_rows if ceded_rows else 0
        for share, owed_rows, ceded_rows in zip(shares, owed, ceded, strict=True)
    ]
    moved, total = sum(taken), sum(gained)
    added = [moved * rows // total for rows in gained]
    added[gained.index(max(gained))] += moved - sum(added)
    return tuple(share - down + up for share, down, up in zip(shares, taken, added, strict=True))
