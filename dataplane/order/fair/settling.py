"""Lines that pay debts: at the start of an era, sources that are ahead give rows to those behind.

Debts are paid over a few rows first, then over parts that are four times as long as the one before,
because a source that is ahead has no more to give than the rows that it is owed. Shares are never
below 0, so the fair order of these lines is within a row of them at every row: while debts are
paid, a source is off by less than its debt and a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .owed import Line

UNIT = 1 << 32
"""Rows are paid in parts of 1/UNIT."""
PAID = UNIT >> 16
"""A debt that is as good as paid: the next era pays it with its own."""
FINEST = 1 << 44
"""The shares of a part that pays are whole numbers with at least this sum."""
FIRST_ROWS = 2
GROWTH = 4

Rows = list[int]
"""Rows by source, in parts of 1/UNIT."""


def settle(lines: Sequence[Line], debts: Rows) -> list[Line]:
    """Return lines that pay debts whose sum is 0.

    A source is paid while it has a share, or, if it has none from there on, at any time."""
    settled = []
    for number, line in enumerate(lines):
        later = {
            source
            for after in lines[number + 1 :]
            for source, shares in enumerate(zip(after.start, after.end, strict=True))
            if any(shares)
        }
        first, rows = 0, FIRST_ROWS
        while first < line.rows and max(debts) > PAID:
            part, debts = _pay(_part(line, first, min(first + rows, line.rows)), debts, later)
            settled.append(part)
            first, rows = first + part.rows, rows * GROWTH
        if first < line.rows:
            settled.append(_part(line, first, line.rows))
    return settled


def _part(line: Line, first: int, end: int) -> Line:
    """Return the rows [first, end) of a line."""
    if line.start == line.end or (first, end) == (0, line.rows):
        return Line(end - first, line.start, line.end)

    def shares(row: int) -> tuple[int, ...]:
        return tuple(
            start * (line.rows - row) + last * row
            for start, last in zip(line.start, line.end, strict=True)
        )

    return Line(end - first, shares(first), shares(end))


def _pay(part: Line, debts: Rows, later: set[int]) -> tuple[Line, Rows]:
    """Return the part with shares that pay, and the debts that it leaves. `later`: the sources with
    a share in later lines."""
    total = sum(part.start)
    owed = [
        (start + end) * part.rows * UNIT // (2 * total)
        for start, end in zip(part.start, part.end, strict=True)
    ]
    ceded = [min(max(-debt, 0), rows) for debt, rows in zip(debts, owed, strict=True)]
    gained = [
        max(debt, 0) if owed[source] or source not in later else 0
        for source, debt in enumerate(debts)
    ]
    ceded = _highest(ceded, min(sum(ceded), sum(gained)))
    gained = _highest(gained, sum(ceded))
    if not any(gained):
        return part, debts
    finer = max(1, FINEST // total)
    start, end = (
        _moved([share * finer for share in shares], owed, ceded, gained)
        for shares in (part.start, part.end)
    )
    remaining = [debt + less - more for debt, less, more in zip(debts, ceded, gained, strict=True)]
    return Line(part.rows, start, end), remaining


def _highest(amounts: Rows, total: int) -> Rows:
    """Return the parts of some amounts above one level, such that they sum to about `total`."""
    ordered = sorted(amounts, reverse=True)
    for count, above in enumerate(accumulate(ordered), start=1):
        below = ordered[count] if count < len(ordered) else 0
        if above - count * below >= total:
            break
    level = -((total - above) // count)  # rounded up
    return [max(amount - level, 0) for amount in amounts]


def _moved(shares: Sequence[int], owed: Rows, ceded: Rows, gained: Rows) -> tuple[int, ...]:
    """Return shares of which each source gives its part of `ceded` / `owed`; they go to the sources
    in proportion to `gained`."""
    less = [
        share * part // whole if part else 0
        for share, whole, part in zip(shares, owed, ceded, strict=True)
    ]
    moved, total = sum(less), sum(gained)
    more = [moved * part // total for part in gained]
    more[gained.index(max(gained))] += moved - sum(more)
    return tuple(share - down + up for share, down, up in zip(shares, less, more, strict=True))
