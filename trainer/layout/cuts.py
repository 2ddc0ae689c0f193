"""Cut the layers into chunks by cost.

A dynamic program minimizes the cost of the most expensive chunk. The fastest pipeline may need
other cuts, so a local search continues from the faster of these and even cuts: it moves one cut by
one layer while the simulated step becomes faster. The result is never slower than even cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from .schedules import SCHEDULES, Kind, Orders
from .simulate import simulate

Cuts = tuple[int, ...]
"""First layers of the chunks after the first."""

ROUNDS = 4
"""Micro-batches per stage in the simulated step."""
BACKWARD = 2.0
"""A backward pass costs so many forward passes."""
MAX_ACTIONS = 2_000_000
"""Maximum number of actions that the search simulates: about two seconds."""


def even_cuts(layers: int, chunks: int) -> Cuts:
    """Return cuts into chunks whose numbers of layers differ by at most one."""
    return tuple(layers * chunk // chunks for chunk in range(1, chunks))


def minimax_cuts(costs: Sequence[float], chunks: int, head: float) -> Cuts:
    """Minimize the cost of the most expensive chunk; the last chunk includes the head."""
    layers = len(costs)
    sums = list(accumulate(costs, initial=0.0))
    # best[n]: minimax cost of n layers in the chunks so far; last_cuts[-1][n]: its last cut
    best = list(sums)
    last_cuts: list[list[int]] = []
    for chunk in range(1, chunks):
        chunk_head = head if chunk == chunks - 1 else 0.0
        next_best, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(chunk + 1, layers + 1):
            choices = ((max(best[k], sums[n] - sums[k] + chunk_head), k) for k in range(chunk, n))
            next_best[n], cut[n] = min(choices)
        best = next_best
        last_cuts.append(cut)
    cuts, n = [], layers
    for cut in reversed(last_cuts):
        n = cut[n]
        cuts.append(n)
    return tuple(reversed(cuts))


def fastest_cuts(
    schedule: str, stages: int, chunks: int, costs: Sequence[float], head: float
) -> Cuts:
    """Search the cuts with the shortest simulated step.

    A stage has `chunks` chunks. `costs` has a forward pass of each layer, `head` that of the loss.
    """
    total = stages * chunks
    if total == 1:
        return ()
    orders = SCHEDULES[schedule].orders(stages, chunks, ROUNDS * stages)
    budget = MAX_ACTIONS // sum(map(len, orders))
    times: dict[Cuts, float] = {}

    def time(cuts: Cuts) -> float:
        if cuts not in times:
            times[cuts] = simulated_time(orders, cuts, costs, head)
        return times[cuts]

    starts = {even_cuts(len(costs), total), minimax_cuts(costs, total, head)}
    best = min(sorted(starts), key=time)
    while len(times) < budget:
        moved = min(neighbour_cuts(best, len(costs)), key=time, default=best)
        if time(moved) >= time(best):
            break
        best = moved
    return best


def simulated_time(orders: Orders, cuts: Cuts, costs: Sequence[float], head: float) -> float:
    return simulate(orders, pass_costs(cuts, costs, head)).time


def pass_costs(cuts: Cuts, costs: Sequence[float], head: float) -> dict[Kind, list[float]]:
    """Return the costs of forward and backward passes, by chunk."""
    forward = [sum(costs[first:end]) for first, end in pairwise((0, *cuts, len(costs)))]
    forward[-1] += head
    return {"forward": forward, "backward": [BACKWARD * cost for cost in forward]}


def neighbour_cuts(cuts: Cuts, layers: int) -> Iterator[Cuts]:
    """Yield cuts with one cut moved by one layer and no empty chunk."""
    for number in range(len(cuts)):
        for moved in (cuts[number] - 1, cuts[number] + 1):
            changed = (*cuts[:number], moved, *cuts[number + 1 :])
            if all(first < end for first, end in pairwise((0, *changed, layers))):
                yield changed
