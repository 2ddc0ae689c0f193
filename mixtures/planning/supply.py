"""The exact rows that remain in sources within `max_epochs`, where a phase begins.

The order up to the phase's sequence length is known, hence every source's position: the rest of
the epoch, and the partial rows at changes of length. Among rows with equal length, a source that is
owed an integer number of rows has received as many. After a change of length or at a branch, debts
are paid to within a fraction of a row (ROUNDING), which stays free.
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
RESOLUTION = 1 << 20
"""Where debts are paid, remaining rows are multiples of 1/RESOLUTION."""


def rows_left(
    build_plan: Callable[[Sequence[Phase]], Plan],
    withheld_rows: Mapping[str, int],
    phases: Sequence[Phase],
    seq_len: int,
) -> dict[str, Fraction]:
    """Compute, by source, the rows with `seq_len` tokens that remain after `phases`.

    `build_plan` builds a plan from phases. `withheld_rows` are reserved, by source.
    """
    same_length_phases = list(takewhile(lambda phase: phase.seq_len == seq_len, reversed(phases)))
    earlier_phases = phases[: len(phases) - len(same_length_phases)]
    plan = build_plan(earlier_phases)
    debts = plan.debts or (Fraction(0),) * len(plan.sources)
    positions = [source.start for source in plan.sources]
    if earlier_phases:
        stream, length = Stream(plan, is_prefix=True), earlier_phases[-1].seq_len
        debts = tuple(stream.debts(plan.end_row))
        positions = [
            source.order.change_length(position, length, seq_len)
            for source, position in zip(plan.sources, stream.positions(plan.end_row), strict=True)
        ]
    owed = [Fraction(0)] * len(plan.sources)
    for phase in same_length_phases:
        owed = [
            rows + share * phase.rows for rows, share in zip(owed, drawn_shares(phase), strict=True)
        ]
    totals = [
        source.order.rows_left(position, seq_len, source.max_epochs)
        - withheld_rows.get(source.name, 0)
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
        remaining = max(total - rows, Fraction(0))
        rounded = Fraction(math.floor(remaining * RESOLUTION), RESOLUTION)
        rows_by_source[source.name] = rounded if any(debts) else remaining
    return rows_by_source
