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

    `costs` has the times of a pass, by chunk. `message` is the time of a message between
    neighbouring chunks: one time, or a list in which number c is between chunks c and c + 1.
    """
    chunks = range(len(costs["forward"]))
    times = message if isinstance(message, Sequence) else [message] * (len(chunks) - 1)
    forward_ends: list[dict[int, float]] = [{} for _ in chunks]
    backward_ends: list[dict[int, float]] = [{} for _ in chunks]
    """End times of a chunk's passes, by micro-batch."""
    ends = {"forward": forward_ends, "backward": backward_ends}
    first_starts = {action.micro: 0.0 for action in orders[0]}
    # What a pass waits for: the end of another pass of its micro-batch, and a message from there.
    awaited = {
        "forward": [(first_starts, 0.0), *zip(forward_ends[:-1], times, strict=True)],
        "backward": [*zip(backward_ends[1:], times, strict=True), (forward_ends[-1], 0.0)],
    }
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    clocks = [0.0] * len(orders)
    unfinished = set(range(len(orders)))
    while unfinished:
        progressed = False
        for stage in sorted(unfinished):
            order, clock, stage_spans = orders[stage], clocks[stage], spans[stage]
            for action in order[len(stage_spans) :]:
                kind, chunk, micro = action.kind, action.chunk, action.micro
                awaited_ends, message_time = awaited[kind][chunk]
                awaited_end = awaited_ends.get(micro)
                if awaited_end is None:
                    break
                ready = awaited_end + message_time
                start = clock if clock > ready else ready
                clock = start + costs[kind][chunk]
                ends[kind][chunk][micro] = clock
                stage_spans.append(ActionSpan(action, start, clock))
                progressed = True
            clocks[stage] = clock
            if len(stage_spans) == len(order):
                unfinished.discard(stage)
        if not progressed and unfinished:
            blocked = {stage: orders[stage][len(spans[stage])] for stage in sorted(unfinished)}
            raise Deadlock(f"stages wait for each other: {blocked}")
    return StepTimeline(spans)


class LinkedPasses(NamedTuple):
    """A step's passes, each after all that it waits for: columns with a value per pass."""

    stages: Sequence[int]
    costs: Sequence[int]
    """Index of its time: forward passes by chunk, then backward passes."""
    awaited: Sequence[int]
    """Number of the pass that it waits for, from 1; 0 for none."""
    has_message: Sequence[bool]
    """True if a message from another chunk comes between."""


def link_passes(orders: Orders, chunks: int) -> LinkedPasses:
    """Order a step's passes once, for `step_ends` with any times; raise Deadlock as `simulate`."""
    ones = [1.0] * chunks
    spans = simulate(orders, {"forward": ones, "backward": ones}).spans
    pairs = [(span, stage) for stage, stage_spans in enumerate(spans) for span in stage_spans]
    pairs.sort(key=lambda pair: pair[0].end)
    numbers: dict[tuple[Kind, int, int], int] = {}
    rows = []
    for number, ((action, _, _), stage) in enumerate(pairs, 1):
        kind, chunk, micro = action.kind, action.chunk, action.micro
        numbers[kind, chunk, micro] = number
        if kind == "forward":
            awaited = numbers.get(("forward", chunk - 1, micro), 0)
        else:  # the last chunk turns around
            awaited = numbers.get(("backward", chunk + 1, micro), 0)
            awaited = awaited or numbers["forward", chunk, micro]
        turns = kind == "backward" and chunk == chunks - 1
        rows.append((stage, chunk + chunks * (kind == "backward"), awaited, not turns))
    stages, costs, awaited_numbers, has_message = zip(*rows, strict=True)
    return LinkedPasses(stages, costs, awaited_numbers, has_message)


def step_ends(
    passes: LinkedPasses, costs: Sequence[float], message: float, num_stages: int
) -> list[float]:
    """Return the end of every stage's last pass, as `simulate`, in a fraction of its time."""
    ends, clocks = [0.0], [0.0] * num_stages
    for stage, cost, awaited, has_message in zip(*passes, strict=True):
        ready = ends[awaited] + message if has_message and awaited else ends[awaited]
        clock = clocks[stage]
        clocks[stage] = end = (clock if clock > ready else ready) + costs[cost]
        ends.append(end)
    return clocks
