"""Simulate a schedule: step time, bubbles, deadlocks.

Stages run their actions in order. A forward pass waits for the previous chunk's forward pass, a
backward pass for the next chunk's backward pass, and both for the message between the chunks.
Messages cost no compute time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedules import Kind, Orders, StageAction


class Deadlock(Exception):
    """Stages wait for each other in a cycle."""


class ActionSpan(NamedTuple):
    """An action with its start and end time."""

    action: StageAction
    start: float
    end: float


@dataclass(frozen=True)
class StepTimeline:
    """A simulated step."""

    spans: Sequence[Sequence[ActionSpan]]
    """Actions, by stage."""

    @property
    def time(self) -> float:
        return max((span.end for stage in self.spans for span in stage), default=0.0)

    @property
    def bubbles(self) -> list[float]:
        """Idle fraction of the step, by stage."""
        busy = [sum(span.end - span.start for span in stage) for stage in self.spans]
        return [1 - seconds / self.time for seconds in busy]


def simulate(
    orders: Orders,
    costs: Mapping[Kind, Sequence[float]],
    message: float | Sequence[float] = 0.0,
) -> StepTimeline:
    """Simulate a step; raise Deadlock if stages wait in a cycle.

    `costs` has the times of a pass, by chunk; `message` that of a hop between chunks: one time, or
    a list with the hop after each chunk but the last.
    """
    last = len(costs["forward"]) - 1
    hops = message if isinstance(message, Sequence) else [message] * last
    forward: list[dict[int, float]] = [{} for _ in costs["forward"]]
    backward: list[dict[int, float]] = [{} for _ in costs["forward"]]
    """End times of a chunk's passes, by micro-batch."""
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    clocks = [0.0] * len(orders)
    waiting = set(range(len(orders)))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            order, clock, done = orders[stage], clocks[stage], spans[stage]
            for action in order[len(done) :]:
                chunk, micro = action.chunk, action.micro
                # `edge` is the chunk that receives no message.
                if action.kind == "forward":
                    ends, previous, edge = forward[chunk], forward[chunk - 1], 0
                else:
                    ends, edge = backward[chunk], last
                    previous = forward[chunk] if chunk == last else backward[chunk + 1]
                ready = 0.0 if ends is forward[0] else previous.get(micro)
                if ready is None:
                    break
                if chunk != edge:
                    ready += hops[chunk - 1 if edge == 0 else chunk]
                start = clock if clock > ready else ready
                clock = start + costs[action.kind][chunk]
                ends[micro] = clock
                done.append(ActionSpan(action, start, clock))
                moved = True
            clocks[stage] = clock
            if len(done) == len(order):
                waiting.discard(stage)
        if not moved and waiting:
            stuck = {stage: orders[stage][len(spans[stage])] for stage in sorted(waiting)}
            raise Deadlock(f"stages wait for each other: {stuck}")
    return StepTimeline(spans)
