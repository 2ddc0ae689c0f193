"""Frontiers: selections of choices, none of which is better than another in memory and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .linear import ROUNDING
from .problem import Choice, Integers, Numbers

POINTS = 300
"""Most selections of layers that are alike, in the first of two passes."""


@dataclass(frozen=True)
class Frontier:
    """Selections of choices of some layers, by rising memory and falling time."""

    memory: Numbers
    time: Numbers
    layers: int
    counts: Callable[[int], list[int]]
    """Layers of each choice, of the selection of a number. Few are asked for of many."""
    whole: bool = True
    """False if selections were left out."""


Known = dict[tuple[object, ...], Frontier | None]
"""Frontiers of layers that are alike, by their choices, the number of those that are within the
work, micro-batches alive, and layers."""
NOTHING = Frontier(np.zeros(1), np.zeros(1), 0, lambda _: [])
"""The only selection of no layers."""


def of_one(choices: Sequence[Choice], alive: int, work: float) -> Frontier | None:
    """Return the frontier of one layer; None if no choice is within `work`."""
    within = [n for n, choice in enumerate(choices) if choice.work <= work]
    if not within:
        return None
    memory = np.array([choices[n].held + alive * choices[n].kept for n in within])
    time = np.array([choices[n].backward for n in within])
    chosen = _best_of(memory, time)

    def counts(number: int) -> list[int]:
        own = within[chosen[number]]
        return [int(n == own) for n in range(len(choices))]

    return Frontier(memory[chosen], time[chosen], 1, counts)


def joined(a: Frontier, b: Frontier, room: float, *, alike: bool = False) -> Frontier:
    """Return the frontier of a selection of each; `alike`: of layers of one sort."""
    memory = (a.memory[:, None] + b.memory).ravel()
    time = (a.time[:, None] + b.time).ravel()
    if room < np.inf:
        [fits] = np.nonzero(memory <= room)
        chosen = fits[_best_of(memory[fits], time[fits])]
    else:
        chosen = _best_of(memory, time)
    of_a, of_b = np.divmod(chosen, len(b.memory))
    counts = _sum_of(a, b, of_a, of_b) if alike else _both_of(a, b, of_a, of_b)
    layers = a.layers + b.layers
    return Frontier(memory[chosen], time[chosen], layers, counts, a.whole and b.whole)


def thinned(whole: Frontier) -> Frontier:
    """Return the fastest selection of each of `POINTS` equal spans of the memory."""
    if len(whole.memory) <= POINTS:
        return whole
    least, most = whole.memory[0], whole.memory[-1]
    span = np.minimum((whole.memory - least) / (most - least) * POINTS, POINTS - 1).astype(int)
    last = np.append(span[1:] != span[:-1], True)  # times fall with the memory
    last[0] = True
    return replace(_part(whole, np.flatnonzero(last)), whole=False)


def promising(frontiers: Sequence[Frontier], room: float, rate: float) -> list[Frontier]:
    """Leave out the selections that are part of no fastest selection of all layers in the room.

    With `rate` seconds for a byte, the waste of a selection is its cost beyond the cheapest one of
    its layers. All layers together take at least the cheapest selections less the cost of the room,
    and their waste. Call the gap the time of one selection that fits less that least time: a
    selection with more waste is part of no faster one.
    """
    costs = [each.time + rate * each.memory for each in frontiers]
    time, spare, chosen = 0.0, room, []
    for each, cost in zip(frontiers, costs, strict=True):
        number = int(cost.argmin())
        chosen.append(number)
        spare -= each.memory[number]
    if spare < 0:
        return [*frontiers]
    for each, number in zip(frontiers, chosen, strict=True):
        own = each.memory[number] + spare
        faster = max(number, int(np.searchsorted(each.memory, own, side="right")) - 1)
        spare = max(0.0, own - each.memory[faster])
        time += each.time[faster]
    least = [cost.min() for cost in costs]
    gap = time * (1 + ROUNDING) - (sum(least) - rate * room)
    return [
        _part(each, np.flatnonzero(cost - cheapest <= gap))
        for each, cost, cheapest in zip(frontiers, costs, least, strict=True)
    ]


def _part(whole: Frontier, left: Integers) -> Frontier:
    return Frontier(
        whole.memory[left],
        whole.time[left],
        whole.layers,
        lambda number: whole.counts(left[number]),
        whole.whole,
    )


class Prune:
    """Exact frontiers without the selections that waste more than a gap."""

    def __init__(self, rate: float, base: Mapping[tuple[int, int], float], gap: float) -> None:
        """`rate` are seconds for a byte; `base` the least seconds with their bytes of a layer, by
        its sort and the micro-batches alive."""
        self.rate, self.base, self.gap = rate, base, gap
        self.known: Known = {}

    def joined(self, a: Frontier, b: Frontier, sort: int, alive: int) -> Frontier:
        """Return the frontier of layers of one sort from those of fewer."""
        base = self.base[sort, alive]
        of_a, of_b = (each.time + self.rate * each.memory - base * each.layers for each in (a, b))
        order = np.argsort(of_b, kind="stable")
        numbers = np.searchsorted(of_b[order], self.gap - of_a, side="right")
        one = np.repeat(np.arange(len(of_a)), numbers)
        begins = np.repeat(np.cumsum(numbers) - numbers, numbers)
        other = order[np.arange(len(one)) - begins]
        memory, time = a.memory[one] + b.memory[other], a.time[one] + b.time[other]
        chosen = _best_of(memory, time)
        counts = _sum_of(a, b, one[chosen], other[chosen])
        return Frontier(memory[chosen], time[chosen], a.layers + b.layers, counts)


def _sum_of(a: Frontier, b: Frontier, of_a: Integers, of_b: Integers) -> Callable[[int], list[int]]:
    """Return the counts of joined selections of one sort."""

    def counts(number: int) -> list[int]:
        pairs = zip(a.counts(of_a[number]), b.counts(of_b[number]), strict=True)
        return [one + other for one, other in pairs]

    return counts


def _both_of(
    a: Frontier, b: Frontier, of_a: Integers, of_b: Integers
) -> Callable[[int], list[int]]:
    """Return the counts of joined selections of two sorts, one after the other."""
    return lambda number: a.counts(of_a[number]) + b.counts(of_b[number])


def _best_of(memory: Numbers, time: Numbers) -> Integers:
    """Return the entries that are faster than all others of as little memory, in rising order."""
    order = np.argsort(memory, kind="stable")  # quick: sums of two frontiers are rising runs
    least = np.minimum.accumulate(time[order])
    faster = order[np.append(True, least[1:] < least[:-1])[: len(order)]]
    last = np.append(memory[faster[1:]] > memory[faster[:-1]], True)  # of those of one size
    found: Integers = faster[last[: len(faster)]]
    return found
