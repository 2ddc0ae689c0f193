"""Shares: what a person wrote, made exact fractions, and then the integer weights of a plan.

Shares are read as the decimals that were written. A phase's integer weights reproduce them
exactly where a table of PERIODS[1] rows can; where none can, the smallest table is used that keeps
the phase within a row of what was asked for, and the plan is refused if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from ...console.errors import PlanError
from ...dataplane.order.plan import Phase, Stretch
from ..spec.mixture import PhaseSpec, endpoints, exact_fraction

PERIODS = (1 << 14, 1 << 17, 1 << 20)
"""Sizes of tables. A small one is made sooner: a million rows take some ten seconds."""
RAMP_STRETCHES = 128
RAMP_PERIOD = 1 << 10
RAMP_END = 1 << 7
"""Rows of a ramp's last stretch: few enough for its weights to settle every account."""

Shares = tuple[Fraction, ...]


def phase_shares(
    phase: PhaseSpec, sources: Sequence[str], replays: Mapping[str, Shares]
) -> tuple[Shares, Shares]:
    """Each source's share at the phase's beginning and at its end, replayed phases dissolved."""
    shares = ([Fraction(0)] * len(sources), [Fraction(0)] * len(sources))
    for name, weight in phase.weights.items():
        for side, value in enumerate(endpoints(weight)):
            if name in replays:
                for index, part in enumerate(replays[name]):
                    shares[side][index] += exact_fraction(value) * part
            else:
                shares[side][sources.index(name)] += exact_fraction(value)
    first, last = (_normal(side) for side in shares)
    return first, last


def average(first: Shares, last: Shares) -> Shares:
    """A phase's shares of its tokens: what replaying it draws by."""
    return tuple((one + two) / 2 for one, two in zip(first, last, strict=True))


def drawn_shares(phase: Phase) -> Shares:
    """The shares by which a planned phase draws, over all of it."""
    sums = [Fraction(0)] * len(phase.stretches[0].weights)
    for stretch in phase.stretches:
        total = sum(stretch.weights)
        for index, weight in enumerate(stretch.weights):
            if weight:
                sums[index] += Fraction(weight * stretch.rows, total * phase.rows)
    return tuple(sums)


def stretches(name: str, rows: int, first: Shares, last: Shares) -> tuple[Stretch, ...]:
    """A phase's rows as stretches of constant integer weights."""
    if first == last:
        return (_constant(name, rows, first),)
    period = max(RAMP_PERIOD, 4 * len(first))
    taken = [Fraction(0)] * len(first)
    result = []
    for start, end in pairwise(_ramp_edges(rows)):
        # What is still owed at the stretch's end, so that rounding does not add up; and what can
        # be owed at the phase's, so that it can be made good.
        wanted = [
            one * end + (two - one) * Fraction(end * end, 2 * rows) - so_far
            for one, two, so_far in zip(first, last, taken, strict=True)
        ]
        later = [
            one * (rows - end) + (two - one) * Fraction(rows * rows - end * end, 2 * rows)
            for one, two in zip(first, last, strict=True)
        ]
        weights = _ramp_weights(wanted, later, period)
        result.append(Stretch(rows=end - start, weights=weights))
        taken = [
            so_far + Fraction(weight * (end - start), period)
            for so_far, weight in zip(taken, weights, strict=True)
        ]
    return tuple(result)


def _ramp_weights(
    wanted: Sequence[Fraction], later: Sequence[Fraction], period: int
) -> tuple[int, ...]:
    """Integers with the sum `period` in proportion to what sources want of a stretch. Nobody gets
    more than a unit above that, or what he wants later."""
    unit = sum(wanted) / period
    weights = [max(math.floor(part / unit), 0) for part in wanted]
    room = [
        (part + more) / unit - weight
        for part, more, weight in zip(wanted, later, weights, strict=True)
    ]
    short = period - sum(weights)
    nearest = sorted(range(len(wanted)), key=lambda index: weights[index] - wanted[index] / unit)
    for index in [index for index in nearest if room[index] >= 1][:short]:
        weights[index] += 1
        room[index] -= 1
    while sum(weights) < period:  # few have room: near the end, or where sources outnumber units
        index = max(nearest, key=lambda index: room[index])
        weights[index] += 1
        room[index] -= 1
    return tuple(weights)


def _constant(name: str, rows: int, shares: Shares) -> Stretch:
    exact_period = math.lcm(*(share.denominator for share in shares))
    error = Fraction(0)
    for period in PERIODS:
        if exact_period <= max(period, PERIODS[1]):
            return Stretch(rows=rows, weights=tuple(int(share * exact_period) for share in shares))
        weights = _rounded(shares, period)
        total = sum(weights)
        error = max(
            abs(Fraction(weight, total) - share) * rows
            for weight, share in zip(weights, shares, strict=True)
        )
        if error < 1:
            return Stretch(rows=rows, weights=weights)
    raise PlanError(
        f"the weights of phase {name} need a finer table than there is: over its {rows:,} rows "
        f"a source would be off by {float(error):.1f} rows",
        hint="write the weights with fewer decimals",
    )


def _ramp_edges(rows: int) -> list[int]:
    """Stretches of even length; the last ones ever shorter, so that the phase ends within a row."""
    count = min(RAMP_STRETCHES, rows)
    edges = [rows * number // count for number in range(count)]
    while rows - edges[-1] > RAMP_END:
        edges.append((edges[-1] + rows) // 2)
    return [*edges, rows]


def _rounded(parts: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """Integers in proportion to `parts` with about `period` as sum: none that is wanted is 0."""
    total = sum(parts)
    scaled = [part / total * period for part in parts]
    floors = [max(math.floor(part), 1 if part else 0) for part in scaled]
    short = period - sum(floors)
    order = sorted(range(len(parts)), key=lambda index: floors[index] - scaled[index])
    for index in order[: max(short, 0)]:
        floors[index] += 1
    return tuple(floors)


def _normal(shares: Sequence[Fraction]) -> Shares:
    total = sum(shares)
    return tuple(share / total for share in shares)
