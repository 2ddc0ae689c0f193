"""Simulator of a schedule: time, bubbles, graphs alive, deadlocks.

Each stage runs its actions in order. A forward pass waits for the forward pass of the chunk before
it, a backward pass for that of the chunk after it. A message takes the same time between any two
chunks, and no stage computes less for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .schedules import Action, Kind, Orders


class Deadlock(Exception):
    """Stages that wait for each other."""


@dataclass(frozen=True)
class Span:
    """One action of a stage, in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    spans: Sequence[Sequence[Span]]
    """Actions of each stage."""

    @property
    def time(self) -> float:
        return max((span.end for stage in self.spans for span in stage), default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """Fraction of the step in which each stage waits."""
        busy = [sum(span.end - span.start for span in stage) for stage in self.spans]
        return [1 - each / self.time for each in busy]


def simulate(
    orders: Orders, costs: Mapping[Kind, Sequence[float]], message: float = 0.0
) -> Timeline:
    """Return when each action runs; `costs` are the times of a pass of each chunk, `message` that
    from a chunk to the next."""
    last = len(costs["forward"]) - 1
    ends: dict[tuple[Kind, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    waiting = set(range(len(orders)))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            order = orders[stage]
            while places[stage] < len(order):
                action = order[places[stage]]
                ready = _ready(action, last, ends, message)
                if ready is None:
                    break
                start = max(clocks[stage], ready)
                end = start + costs[action.kind][action.chunk]
                ends[action.kind, action.chunk, action.micro] = clocks[stage] = end
                spans[stage].append(Span(action, start, end))
                places[stage] += 1
                moved = True
            if places[stage] == len(order):
                waiting.discard(stage)
        if not moved and waiting:
            stuck = {stage: orders[stage][places[stage]] for stage in sorted(waiting)}
            raise Deadlock(f"stages wait for each other: {stuck}")
    return Timeline(spans)


def _ready(
    action: Action, last: int, ends: Mapping[tuple[Kind, int, int], float], message: float
) -> float | None:
    """Return when the inputs of an action are there; None if that is not known yet."""
    chunk, micro = action.chunk, action.micro
    if action.kind == "forward":
        if chunk == 0:
            return 0.0
        before = ends.get(("forward", chunk - 1, micro))
        return None if before is None else before + message
    own = ends.get(("forward", chunk, micro))
    if own is None or chunk == last:
        return own
    behind = ends.get(("backward", chunk + 1, micro))
    return None if behind is None else max(own, behind + message)


def most_alive(order: Sequence[Action], sizes: Sequence[float] | None = None) -> float:
    """Return the most that a stage keeps for its backward passes: graphs, or `sizes` by chunk."""
    alive = most = 0.0
    for action in order:
        size = 1.0 if sizes is None else sizes[action.chunk]
        alive += size if action.kind == "forward" else -size
        most = max(most, alive)
    return most
