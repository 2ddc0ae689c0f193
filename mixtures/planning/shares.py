"""Convert a mixture's shares to exact fractions, and to a plan's integer weights.

Shares are the decimals in the YAML. A changing share is a line; or a staircase, where tables assign
the rows (`Plan.fair`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from ...dataplane.order.plan import MAX_TABLE_ROWS, Phase, Stretch
from ..mixture_file.mixture import PhaseSpec, endpoints, exact_fraction, explicit_shares

RAMP_STRETCHES = 128
RAMP_PERIOD = 1 << 10
RAMP_END = 1 << 7
"""Maximum rows in a ramp's last stretch, so that its weights can settle all debts."""

Shares = tuple[Fraction, ...]


def phase_shares(
    phase: PhaseSpec, sources: Sequence[str], replays: Mapping[str, Shares]
) -> tuple[Shares, Shares]:
    """Resolve the shares by source at both ends of a phase.

    A replayed phase stands for its sources, with the shares in `replays`.
    """
    shares = ([Fraction(0)] * len(sources), [Fraction(0)] * len(sources))
    for name, weight in explicit_shares(phase).items():
        for side, value in enumerate(endpoints(weight)):
            if name in replays:
                for index, share in enumerate(replays[name]):
                    shares[side][index] += exact_fraction(value) * share
            else:
                shares[side][sources.index(name)] += exact_fraction(value)
    first, last = (_normalize(side) for side in shares)
    return first, last


def average_shares(first: Shares, last: Shares) -> Shares:
    """Average the shares over a phase; a replay draws by this average."""
    return tuple((start + end) / 2 for start, end in zip(first, last, strict=True))


def drawn_shares(phase: Phase) -> Shares:
    """Compute the average shares of a planned phase from the integer weights."""
    sums = [Fraction(0)] * len(phase.stretches[0].weights)
    for stretch in phase.stretches:
        denominator = 2 * sum(stretch.weights) * phase.rows
        edges = zip(stretch.weights, stretch.to or stretch.weights, strict=True)
        for index, (start, end) in enumerate(edges):
            if start or end:
                sums[index] += Fraction((start + end) * stretch.rows, denominator)
    return tuple(sums)


def fit_tables(first: Shares, last: Shares) -> bool:
    """Tell whether a table with MAX_TABLE_ROWS rows can hold the shares exactly."""
    return all(
        math.lcm(*(share.denominator for share in side)) <= MAX_TABLE_ROWS for side in (first, last)
    )


def make_line(rows: int, first: Shares, last: Shares) -> Stretch:
    """Make one stretch with the exact shares, which change linearly."""
    common = math.lcm(*(share.denominator for share in (*first, *last)))
    start, end = (tuple(int(share * common) for share in side) for side in (first, last))
    return Stretch(rows=rows, weights=start, to=() if start == end else end)


def split_stretches(rows: int, first: Shares, last: Shares) -> tuple[Stretch, ...]:
    """Split the rows of a phase into stretches with constant integer weights."""
    if first == last:
        return (make_line(rows, first, last),)
    period = max(RAMP_PERIOD, 4 * len(first))
    # Shares are integers over `common`, and rows are counted in units of 1 / (2 * common * rows *
    # period): integers are several times faster than fractions.
    common = math.lcm(*(share.denominator for share in (*first, *last)))
    starts = [int(share * common) for share in first]
    changes = [int(share * common) - start for share, start in zip(last, starts, strict=True)]
    unit = 2 * common * rows
    taken = [0] * len(first)
    ramp = []
    for start, end in pairwise(_ramp_edges(rows)):
        # Targets are cumulative, so that rounding errors do not add up.
        owed = [
            (initial * 2 * rows * end + change * end * end) * period
            for initial, change in zip(starts, changes, strict=True)
        ]
        targets = [at_end - so_far for at_end, so_far in zip(owed, taken, strict=True)]
        later = [
            (2 * initial + change) * rows * rows * period - at_end
            for initial, change, at_end in zip(starts, changes, owed, strict=True)
        ]
        weights = _apportion_ramp(targets, later, period)
        ramp.append(Stretch(rows=end - start, weights=weights))
        taken = [
            so_far + weight * (end - start) * unit
            for so_far, weight in zip(taken, weights, strict=True)
        ]
    return tuple(ramp)


def _apportion_ramp(targets: Sequence[int], later: Sequence[int], period: int) -> tuple[int, ...]:
    """Apportion `period` units in proportion to the `targets` of a stretch.

    A source gets at most one unit above its target, and never more than the phase still owes: the
    target plus the `later` rows, after the stretch.
    """
    total = sum(targets)  # a unit is total / period rows
    weights = [max(rows * period // total, 0) for rows in targets]
    budgets = [
        (rows + more) * period - weight * total
        for rows, more, weight in zip(targets, later, weights, strict=True)
    ]
    deficit = period - sum(weights)
    by_need = sorted(
        range(len(targets)), key=lambda index: weights[index] * total - targets[index] * period
    )
    for index in [index for index in by_need if budgets[index] >= total][:deficit]:
        weights[index] += 1
        budgets[index] -= total
    # Near the end, and with more sources than units, too few budgets hold a whole unit.
    while sum(weights) < period:
        index = max(by_need, key=lambda index: budgets[index])
        weights[index] += 1
        budgets[index] -= total
    return tuple(weights)


def _ramp_edges(rows: int) -> list[int]:
    """Place the edges of a ramp's stretches: equally spaced, then halved towards the end, so that
    every source ends within a row of its share."""
    count = min(RAMP_STRETCHES, rows)
    edges = [rows * number // count for number in range(count)]
    while rows - edges[-1] > RAMP_END:
        edges.append((edges[-1] + rows) // 2)
    return [*edges, rows]


def _normalize(shares: Sequence[Fraction]) -> Shares:
    total = sum(shares)
    return tuple(share / total for share in shares)
