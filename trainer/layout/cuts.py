"""Cuts of the layers into chunks, by cost.

The greatest chunk should be as small as possible: that is found exactly. But the fastest pipeline
need not have it, so the simulator decides: from the even cuts and from those, one cut moves by one
layer for as long as a step becomes faster. The result is never slower than even cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from .schedules import SCHEDULES, Kind, Orders
from .simulate import simulate

Cuts = tuple[int, ...]
"""First layers of the chunks after the first."""

ROUNDS = 4
"""Micro-batches for each stage of the simulated step."""
BACKWARD = 2.0
"""Cost of a backward pass, in forward passes."""
MOST_ACTIONS = 2_000_000
"""Most actions that the search simulates: about two seconds."""


def even(layers: int, chunks: int) -> Cuts:
    """Return cuts into chunks of equally many layers, as far as possible."""
    return tuple(layers * chunk // chunks for chunk in range(1, chunks))


def least_greatest(costs: Sequence[float], chunks: int, head: float) -> Cuts:
    """Return the cuts whose greatest chunk costs least; the last chunk has the head too."""
    layers = len(costs)
    sums = list(accumulate(costs, initial=0.0))
    # best[n]: the least greatest cost of n layers in the chunks so far; first[k][n]: its last cut
    best = [sums[n] for n in range(layers + 1)]
    first: list[list[int]] = []
    for chunk in range(1, chunks):
        more = head if chunk == chunks - 1 else 0.0
        following, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(chunk + 1, layers + 1):
            choices = ((max(best[k], sums[n] - sums[k] + more), k) for k in range(chunk, n))
            following[n], cut[n] = min(choices)
        best = following
        first.append(cut)
    found, n = [], layers
    for cut in reversed(first):
        n = cut[n]
        found.append(n)
    return tuple(reversed(found))


def fastest(schedule: str, stages: int, chunks: int, costs: Sequence[float], head: float) -> Cuts:
    """Return the cuts of the fastest simulated step; `chunks` are those of a stage. `costs` are
    those of the layers, `head` that of the loss."""
    total = stages * chunks
    if total == 1:
        return ()
    orders = SCHEDULES[schedule].orders(stages, chunks, ROUNDS * stages)
    budget = MOST_ACTIONS // sum(map(len, orders))
    known: dict[Cuts, float] = {}

    def time(cuts: Cuts) -> float:
        if cuts not in known:
            known[cuts] = step_time(orders, cuts, costs, head)
        return known[cuts]

    starts = {even(len(costs), total), least_greatest(costs, total, head)}
    best = min(sorted(starts), key=time)
    while len(known) < budget:
        moved = min(neighbours(best, len(costs)), key=time, default=best)
        if time(moved) >= time(best):
            break
        best = moved
    return best


def step_time(orders: Orders, cuts: Cuts, costs: Sequence[float], head: float) -> float:
    return simulate(orders, pass_costs(cuts, costs, head)).time


def pass_costs(cuts: Cuts, costs: Sequence[float], head: float) -> dict[Kind, list[float]]:
    """Return the costs of a forward and a backward pass of each chunk."""
    forward = [sum(costs[first:end]) for first, end in pairwise((0, *cuts, len(costs)))]
    forward[-1] += head
    return {"forward": forward, "backward": [BACKWARD * cost for cost in forward]}


def neighbours(cuts: Cuts, layers: int) -> Iterator[Cuts]:
    """Yield the cuts in which one cut is moved by one layer, and no chunk is empty."""
    for number in range(len(cuts)):
        for moved in (cuts[number] - 1, cuts[number] + 1):
            changed = (*cuts[:number], moved, *cuts[number + 1 :])
            if all(first < end for first, end in pairwise((0, *changed, layers))):
                yield changed
