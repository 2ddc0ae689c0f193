"""Simulator of a schedule: time, bubbles, graphs alive, deadlocks.

Each stage runs its actions in order. A forward pass waits for the forward pass of the chunk before
it, a backward pass for that of the chunk after it, and for the message between them. No stage
computes less for a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedules import Action, Kind, Orders


class Deadlock(Exception):
    """Stages that wait for each other."""


class Span(NamedTuple):
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
    orders: Orders,
    costs: Mapping[Kind, Sequence[float]],
    message: float | Sequence[float] = 0.0,
) -> Timeline:
    """Return when each action runs; `costs` are the times of a pass of each chunk, `message` that
    from a chunk to the next, or from each chunk but the last to its next."""
    last = len(costs["forward"]) - 1
    hops = message if isinstance(message, Sequence) else [message] * last
    forward: list[dict[int, float]] = [{} for _ in costs["forward"]]
    backward: list[dict[int, float]] = [{} for _ in costs["forward"]]
    """Ends of the passes of each chunk, by micro-batch."""
    spans: list[list[Span]] = [[] for _ in orders]
    clocks = [0.0] * len(orders)
    waiting = set(range(len(orders)))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            order, clock, done = orders[stage], clocks[stage], spans[stage]
            for place in range(len(done), len(order)):
                action = order[place]
                chunk, micro = action.chunk, action.micro
                # The pass before this one, and the chunk at whose end no message arrives.
                if action.kind == "forward":
                    ends, before, edge = forward[chunk], forward[chunk - 1], 0
                else:
                    ends, edge = backward[chunk], last
                    before = forward[chunk] if chunk == last else backward[chunk + 1]
                ready = 0.0 if ends is forward[0] else before.get(micro)
                if ready is None:
                    break
                if chunk != edge:
                    ready += hops[chunk - 1 if edge == 0 else chunk]
                start = clock if clock > ready else ready
                clock = start + costs[action.kind][chunk]
                ends[micro] = clock
                done.append(Span(action, start, clock))
                moved = True
            clocks[stage] = clock
            if len(done) == len(order):
                waiting.discard(stage)
        if not moved and waiting:
            stuck = {stage: orders[stage][len(spans[stage])] for stage in sorted(waiting)}
            raise Deadlock(f"stages wait for each other: {stuck}")
    return Timeline(spans)
