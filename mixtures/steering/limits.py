"""The largest share that each source can have for the rest of a phase within `max_epochs`.

A source must also serve what the later phases plan to draw from it. The limit is a lower bound: two
rows stay free, because the order may be ahead of the shares, and a longest row for each epoch and
later phase, which a change of the sequence length may leave over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from ...dataplane.order.stream import Stream
from ..planning.shares import drawn_shares

UNITS = 1_000_000
"""Shares of controllers are multiples of 1/UNITS."""
FREE_ROWS = 2


def find_limits(stream: Stream, row: int) -> dict[str, float]:
    """Compute, by source, the largest share from `row` to the end of its phase; only those below
    1."""
    plan = stream.plan
    phase = plan.phase_at(row)
    later_phases = [later for later in plan.phases if later.first_row > row]
    lengths = {phase.seq_len, *(later.seq_len for later in later_phases)}
    positions, debts = stream.positions(row), stream.debts(row)
    length_before = plan.phase_at(max(row - 1, plan.first_row)).seq_len
    limits: dict[str, float] = {}
    for index, source in enumerate(plan.sources):
        position = positions[index]
        if length_before != phase.seq_len:
            position = source.order.change_length(position, length_before, phase.seq_len)
        rows = source.order.rows_left(position, phase.seq_len, source.max_epochs)
        supply = Fraction(rows * phase.seq_len) - max(debts[index], Fraction(0))
        if len(lengths) > 1:
            supply -= max(lengths) * (len(later_phases) + source.max_epochs - position.epoch)
        for later in later_phases:
            supply -= drawn_shares(later)[index] * later.tokens
        supply -= FREE_ROWS * max(lengths)
        share = supply / ((phase.end_row - row) * phase.seq_len)
        if share < 1:
            limits[source.name] = max(math.floor(share * UNITS), 0) / UNITS
    return limits


def fit_limits(shares: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float] | None:
    """Cut shares to their limits; the rest of the sources divide the difference in proportion.
    Returns multiples of 1/UNITS that sum to 1, or None if the limits leave too little."""
    caps = {name: round(limits.get(name, 1.0) * UNITS) for name in shares}
    if sum(caps.values()) < UNITS:
        return None
    limited: set[str] = set()
    while True:
        free = {name: share for name, share in shares.items() if name not in limited}
        units = UNITS - sum(caps[name] for name in limited)
        total = math.fsum(free.values())
        if not total:  # only sources without a share are left
            free, total = dict.fromkeys(free, 1.0), float(len(free))
        exact = {name: share * units / total for name, share in free.items()}
        exceeding = {name for name in free if exact[name] > caps[name]}
        if not exceeding:
            break
        limited |= exceeding
    counts = {name: caps[name] if name in limited else math.floor(exact[name]) for name in shares}
    by_need = sorted(free, key=lambda name: counts[name] - exact[name])
    for name in [name for name in by_need if counts[name] < caps[name]][
        : UNITS - sum(counts.values())
    ]:
        counts[name] += 1
    return {name: count / UNITS for name, count in counts.items()}
