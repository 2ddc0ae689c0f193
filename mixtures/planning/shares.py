"""Turn the shares of a mixture into exact fractions, and those into integer weights of a plan.

Shares are read as the decimals that were written. Where tables serve the rows (`Plan.fair`), a
changing share is a staircase; else it is a line of the exact shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from ...dataplane.order.plan import PERIOD, Phase, Stretch
from ..mixture_file.mixture import PhaseSpec, endpoints, exact_fraction, explicit_shares

RAMP_STRETCHES = 128
RAMP_PERIOD = 1 << 10
RAMP_END = 1 << 7
"""Maximum rows of a ramp's last stretch, so that its weights can settle all debts."""

Shares = tuple[Fraction, ...]


def phase_shares(
    phase: PhaseSpec, sources: Sequence[str], replays: Mapping[str, Shares]
) -> tuple[Shares, Shares]:
    """Return each source's share at the start and at the end of a phase.

    Replayed phases are replaced by their sources: `replays` has the shares of earlier phases.
    """
    shares = ([Fraction(0)] * len(sources), [Fraction(0)] * len(sources))
    for name, weight in explicit_shares(phase).items():
        for side, value in enumerate(endpoints(weight)):
            if name in replays:
                for index, share in enumerate(replays[name]):
                    shares[side][index] += exact_fraction(value) * share
            else:
                shares[side][sources.index(name)] += exact_fraction(value)
    first, last = (_normal(side) for side in shares)
    return first, last


def average(first: Shares, last: Shares) -> Shares:
    """Return the average shares of a phase. A phase that replays it draws by these."""
    return tuple((start + end) / 2 for start, end in zip(first, last, strict=True))


def drawn_shares(phase: Phase) -> Shares:
    """Return the average shares of a planned phase, from its integer weights."""
    sums = [Fraction(0)] * len(phase.stretches[0].weights)
    for stretch in phase.stretches:
        whole = 2 * sum(stretch.weights) * phase.rows
        both = zip(stretch.weights, stretch.to or stretch.weights, strict=True)
        for index, (start, end) in enumerate(both):
            if start or end:
                sums[index] += Fraction((start + end) * stretch.rows, whole)
    return tuple(sums)


def fits_tables(first: Shares, last: Shares) -> bool:
    """Return whether a table of PERIOD rows holds the shares of a phase."""
    return all(math.lcm(*(share.denominator for share in side)) <= PERIOD for side in (first, last))


def line(rows: int, first: Shares, last: Shares) -> Stretch:
    """Return the rows of a phase as one stretch of the exact shares."""
    common = math.lcm(*(share.denominator for share in (*first, *last)))
    start, end = (tuple(int(share * common) for share in side) for side in (first, last))
    return Stretch(rows=rows, weights=start, to=() if start == end else end)


def stretches(rows: int, first: Shares, last: Shares) -> tuple[Stretch, ...]:
    """Split the rows of a phase into stretches of constant integer weights."""
    if first == last:
        return (line(rows, first, last),)
    period = max(RAMP_PERIOD, 4 * len(first))
    # Shares are integers over `common`, and rows are counted in units of 1 / (2 * common * rows *
    # period): integers are several times faster than fractions.
    common = math.lcm(*(share.denominator for share in (*first, *last)))
    starts = [int(share * common) for share in first]
    changes = [int(share * common) - start for share, start in zip(last, starts, strict=True)]
    unit = 2 * common * rows
    taken = [0] * len(first)
    result = []
    for start, end in pairwise(_ramp_edges(rows)):
        # wanted: rows that each source is owed at the end of the stretch, so that rounding errors
        # do not add up. later: rows that it is still owed after that, until the phase ends.
        owed = [
            (one * 2 * rows * end + change * end * end) * period
            for one, change in zip(starts, changes, strict=True)
        ]
        wanted = [at_end - so_far for at_end, so_far in zip(owed, taken, strict=True)]
        later = [
            (2 * one + change) * rows * rows * period - at_end
            for one, change, at_end in zip(starts, changes, owed, strict=True)
        ]
        weights = _ramp_weights(wanted, later, period)
        result.append(Stretch(rows=end - start, weights=weights))
        taken = [
            so_far + weight * (end - start) * unit
            for so_far, weight in zip(taken, weights, strict=True)
        ]
    return tuple(result)


def _ramp_weights(wanted: Sequence[int], later: Sequence[int], period: int) -> tuple[int, ...]:
    """Return integers that sum to `period`, in proportion to the `wanted` rows of a stretch.

    No source gets more than one unit above that, or more than it is owed until the end of the
    phase (`later`).
    """
    total = sum(wanted)  # a unit of weight is total / period
    weights = [max(rows * period // total, 0) for rows in wanted]
    room = [
        (rows + more) * period - weight * total
        for rows, more, weight in zip(wanted, later, weights, strict=True)
    ]
    short = period - sum(weights)
    nearest = sorted(
        range(len(wanted)), key=lambda index: weights[index] * total - wanted[index] * period
    )
    for index in [index for index in nearest if room[index] >= total][:short]:
        weights[index] += 1
        room[index] -= total
    # Near the end, and with more sources than units, too few sources have room for a whole unit.
    while sum(weights) < period:
        index = max(nearest, key=lambda index: room[index])
        weights[index] += 1
        room[index] -= total
    return tuple(weights)


def _ramp_edges(rows: int) -> list[int]:
    """Return the edges of a ramp's stretches: of equal length, then shorter and shorter, so that
    every source ends within a row of its share."""
    count = min(RAMP_STRETCHES, rows)
    edges = [rows * number // count for number in range(count)]
    while rows - edges[-1] > RAMP_END:
        edges.append((edges[-1] + rows) // 2)
    return [*edges, rows]


def _normal(shares: Sequence[Fraction]) -> Shares:
    total = sum(shares)
    return tuple(share / total for share in shares)
