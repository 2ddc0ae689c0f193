"""The rows that sources have left within their `max_epochs`, where a phase begins: exact.

The order of all rows before the phase's length is known, hence each source's position there: what
its epoch has left, and the remainders that changes of length have cut. Within the rows of a length,
a source that is owed a whole number of rows has been given just as many. After a change of length
or at a branch, debts are paid to within a small part of a row (ROUNDING), which is kept free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import compress, takewhile

from ...dataplane.order.plan import Phase, Plan
from ...dataplane.order.stream import Stream
from .shares import drawn_shares

ROUNDING = Fraction(1, 1 << 10)
FINEST = 1 << 20
"""Where debts are paid, what is left is a multiple of 1/FINEST of a row."""


def rows_left(
    plan_of: Callable[[Sequence[Phase]], Plan],
    kept_back: Mapping[str, int],
    phases: Sequence[Phase],
    seq_len: int,
) -> dict[str, Fraction]:
    """Return the rows of `seq_len` tokens that each source has left after some phases.

    `plan_of` returns the plan of some phases. `kept_back`: rows of sources that are not to be
    given."""
    same = list(takewhile(lambda phase: phase.seq_len == seq_len, reversed(phases)))
    before = phases[: len(phases) - len(same)]
    plan = plan_of(before)
    debts = plan.debts or (Fraction(0),) * len(plan.sources)
    positions = [source.start for source in plan.sources]
    if before:
        stream, length = Stream(plan, goes_on=True), before[-1].seq_len
        debts = tuple(stream.debts(plan.last_row))
        positions = [
            source.order.change_length(position, length, seq_len)
            for source, position in zip(plan.sources, stream.positions(plan.last_row), strict=True)
        ]
    owed = [Fraction(0)] * len(plan.sources)
    for phase in same:
        owed = [
            rows + share * phase.rows for rows, share in zip(owed, drawn_shares(phase), strict=True)
        ]
    totals = [
        source.order.rows_left(position, seq_len, source.max_epochs) - kept_back.get(source.name, 0)
        for source, position in zip(plan.sources, positions, strict=True)
    ]
    if any(debts):
        # The era pays debts down to the mean of the sources that it draws from (eras.py).
        drawn = [rows > 0 or total > 0 for rows, total in zip(owed, totals, strict=True)]
        level = sum(compress(debts, drawn), Fraction(0))
        level /= max(sum(drawn), 1)
        owed = [
            rows + (debt - level) / seq_len + ROUNDING
            for rows, debt in zip(owed, debts, strict=True)
        ]
    rows_by_source = {}
    for source, total, rows in zip(plan.sources, totals, owed, strict=True):
        value = max(total - rows, Fraction(0))
        rounded = Fraction(math.floor(value * FINEST), FINEST)
        rows_by_source[source.name] = rounded if any(debts) else value
    return rows_by_source
