"""Pareto frontiers in memory and time, for several layers' choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .linear import ROUNDING
from .problem import Choice, Integers, Numbers

POINTS = 300
"""Maximum number of selections per kind in the first pass, which thins frontiers."""


@dataclass(frozen=True)
class Frontier:
    """Selections, a choice per layer, by rising memory and falling time."""

    memory: Numbers
    """Bytes [selections]."""
    time: Numbers
    """Seconds [selections]."""
    num_layers: int
    counts: Callable[[int], list[int]]
    """Returns a selection's number of layers by choice; computed on demand, as few are needed."""
    complete: bool = True
    """False if selections were left out."""


FrontierCache = dict[tuple[object, ...], Frontier | None]
"""Frontiers for identical layers, by choices, number of choices within the workspace, micro-batches
in flight, and number of layers."""
EMPTY = Frontier(np.zeros(1), np.zeros(1), 0, lambda _: [])
"""The single selection for zero layers."""


def layer_frontier(choices: Sequence[Choice], in_flight: int, workspace: float) -> Frontier | None:
    """Return a single layer's frontier; None if no choice is within `workspace`."""
    within = [n for n, choice in enumerate(choices) if choice.workspace <= workspace]
    if not within:
        return None
    memory = np.array([choices[n].state + in_flight * choices[n].activations for n in within])
    time = np.array([choices[n].backward for n in within])
    chosen = _pareto_front(memory, time)

    def counts(number: int) -> list[int]:
        index = within[chosen[number]]
        return [int(n == index) for n in range(len(choices))]

    return Frontier(memory[chosen], time[chosen], 1, counts)


def join_frontiers(a: Frontier, b: Frontier, budget: float, *, same_kind: bool = False) -> Frontier:
    """Return the frontier for both layer sets together. With `same_kind`, counts by choice add up;
    else they are concatenated."""
    memory = (a.memory[:, None] + b.memory).ravel()
    time = (a.time[:, None] + b.time).ravel()
    if budget < np.inf:
        [fits] = np.nonzero(memory <= budget)
        chosen = fits[_pareto_front(memory[fits], time[fits])]
    else:
        chosen = _pareto_front(memory, time)
    a_indices, b_indices = np.divmod(chosen, len(b.memory))
    counts = (
        _add_counts(a, b, a_indices, b_indices)
        if same_kind
        else _concatenate_counts(a, b, a_indices, b_indices)
    )
    num_layers = a.num_layers + b.num_layers
    return Frontier(memory[chosen], time[chosen], num_layers, counts, a.complete and b.complete)


def thin_frontier(frontier: Frontier) -> Frontier:
    """Divide the memory into `POINTS` equal spans, and keep the fastest selection per span."""
    if len(frontier.memory) <= POINTS:
        return frontier
    smallest, largest = frontier.memory[0], frontier.memory[-1]
    span = np.minimum(
        (frontier.memory - smallest) / (largest - smallest) * POINTS, POINTS - 1
    ).astype(int)
    last = np.append(span[1:] != span[:-1], True)  # times fall with the memory
    last[0] = True
    return replace(_select(frontier, np.flatnonzero(last)), complete=False)


def prune_frontiers(frontiers: Sequence[Frontier], budget: float, rate: float) -> list[Frontier]:
    """Drop selections that no optimal solution within `budget` bytes can contain.

    At `rate` seconds per byte, a selection's waste is its cost above the cheapest one for the same
    layers. All layers together take at least the cheapest selections minus the budget's cost, plus
    their waste. The gap is a known solution's time minus this lower bound without waste: a
    selection with more waste is in no faster solution.
    """
    costs = [frontier.time + rate * frontier.memory for frontier in frontiers]
    time, spare, chosen = 0.0, budget, []
    for frontier, cost in zip(frontiers, costs, strict=True):
        number = int(cost.argmin())
        chosen.append(number)
        spare -= frontier.memory[number]
    if spare < 0:
        return [*frontiers]
    for frontier, number in zip(frontiers, chosen, strict=True):
        free_memory = frontier.memory[number] + spare
        faster = max(number, int(np.searchsorted(frontier.memory, free_memory, side="right")) - 1)
        spare = max(0.0, free_memory - frontier.memory[faster])
        time += frontier.time[faster]
    min_costs = [cost.min() for cost in costs]
    gap = time * (1 + ROUNDING) - (sum(min_costs) - rate * budget)
    return [
        _select(frontier, np.flatnonzero(cost - cheapest <= gap))
        for frontier, cost, cheapest in zip(frontiers, costs, min_costs, strict=True)
    ]


def _select(frontier: Frontier, indices: Integers) -> Frontier:
    return Frontier(
        frontier.memory[indices],
        frontier.time[indices],
        frontier.num_layers,
        lambda number: frontier.counts(indices[number]),
        frontier.complete,
    )


class Prune:
    """Joins exact frontiers, without selections that waste more than a gap."""

    def __init__(self, rate: float, base: Mapping[tuple[int, int], float], gap: float) -> None:
        """`rate` is in seconds per byte. `base` is a layer's minimum cost, bytes included, by kind
        and micro-batches in flight."""
        self.rate, self.base, self.gap = rate, base, gap
        self.cache: FrontierCache = {}

    def join_frontiers(self, a: Frontier, b: Frontier, kind: int, in_flight: int) -> Frontier:
        """Join two frontiers for layers with the same kind."""
        base = self.base[kind, in_flight]
        a_waste, b_waste = (
            frontier.time + self.rate * frontier.memory - base * frontier.num_layers
            for frontier in (a, b)
        )
        order = np.argsort(b_waste, kind="stable")
        num_partners = np.searchsorted(b_waste[order], self.gap - a_waste, side="right")
        a_indices = np.repeat(np.arange(len(a_waste)), num_partners)
        begins = np.repeat(np.cumsum(num_partners) - num_partners, num_partners)
        b_indices = order[np.arange(len(a_indices)) - begins]
        memory = a.memory[a_indices] + b.memory[b_indices]
        time = a.time[a_indices] + b.time[b_indices]
        chosen = _pareto_front(memory, time)
        counts = _add_counts(a, b, a_indices[chosen], b_indices[chosen])
        return Frontier(memory[chosen], time[chosen], a.num_layers + b.num_layers, counts)


def _add_counts(
    a: Frontier, b: Frontier, a_indices: Integers, b_indices: Integers
) -> Callable[[int], list[int]]:
    """Return the counts for joined selections with the same kind, added up by choice."""

    def counts(number: int) -> list[int]:
        pairs = zip(a.counts(a_indices[number]), b.counts(b_indices[number]), strict=True)
        return [a_count + b_count for a_count, b_count in pairs]

    return counts


def _concatenate_counts(
    a: Frontier, b: Frontier, a_indices: Integers, b_indices: Integers
) -> Callable[[int], list[int]]:
    """Return the counts for joined selections with two kinds, concatenated."""
    return lambda number: a.counts(a_indices[number]) + b.counts(b_indices[number])


def _pareto_front(memory: Numbers, time: Numbers) -> Integers:
    """Return the indices on the Pareto front, by rising memory."""
    order = np.argsort(memory, kind="stable")  # quick: joined frontiers consist of rising runs
    fastest = np.minimum.accumulate(time[order])
    faster = order[np.append(True, fastest[1:] < fastest[:-1])[: len(order)]]
    last = np.append(memory[faster[1:]] > memory[faster[:-1]], True)  # the fastest of equal sizes
    front: Integers = faster[last[: len(faster)]]
    return front
