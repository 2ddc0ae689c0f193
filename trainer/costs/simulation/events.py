"""Events of a rank within a pass, and its memory over a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...pipeline.schedules import Kind
from ..planner.division.problem import Fixed
from .messages import Messages
from .step import Simulation

KINDS: tuple[Kind, ...] = ("forward", "backward")
ORDER = ("tensor", "context", "experts", "recompute", "compute", "ends", "data")
"""Parts of a layer's pass in the order of the drawing; a layer has them in turns. `data` is what no
computation hides."""


class Event(NamedTuple):
    """Work or messages of a rank."""

    lane: str
    """Part of the step. `beside`: data messages, which run beside the other lanes."""
    start: float
    end: float
    text: str


class Part(NamedTuple):
    """A layer, the embedding or the head in a pass."""

    text: str
    sort: int | None
    """None: the embedding or the head."""
    seconds: dict[str, float]
    kept: float
    """Bytes from the forward to the backward pass."""
    work: float
    """Bytes while it runs."""
    beside: float
    """Seconds of the data messages beside it."""


class Events:
    """Events of the passes of a plan."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.messages = Messages(simulation.costs, simulation.grid)

    def parts(self, chunk: int, kind: Kind) -> list[Part]:
        """Return the parts of a pass in their order."""
        problem, plan = self.simulation.problem, self.simulation.plan
        names = [layer.name for layer in self.simulation.costs.sorts]
        found = []
        if chunk == 0:
            found.append(self._end("embedding", problem.first, kind))
        for layer in range(*problem.ranges(plan.cuts)[chunk]):
            choice, sort = plan.choices[layer], problem.layers[layer]
            way = choice.name
            seconds = way.forward if kind == "forward" else way.backward
            beside = self.messages.beside(sort, way, kind)
            text = f"layer {layer}, {names[sort]}"
            found.append(Part(text, sort, dict(seconds), choice.kept, choice.work, beside))
        if chunk == problem.all_chunks - 1:
            found.append(self._end("head and loss", problem.last, kind))
        return found if kind == "forward" else found[::-1]

    def _end(self, text: str, fixed: Fixed, kind: Kind) -> Part:
        seconds = fixed.forward if kind == "forward" else fixed.backward
        return Part(text, None, {"ends": seconds}, fixed.kept, fixed.work, 0.0)

    def of_micro_batch(self, chunk: int) -> list[Event]:
        """Return the events of one micro-batch in a chunk: forward pass, then backward pass."""
        found, clock = [], 0.0
        for kind in KINDS:
            for part in self.parts(chunk, kind):
                start = clock
                for lane in ORDER:
                    seconds = part.seconds.get(lane, 0.0)
                    if seconds:
                        text = f"{part.text}, {kind}: {lane} {seconds * 1e3:.3g} ms"
                        found.append(Event(lane, clock, clock + seconds, text))
                        clock += seconds
                if part.beside:
                    text = f"{part.text}, {kind}: data messages {part.beside * 1e3:.3g} ms"
                    found.append(Event("beside", start, min(clock, start + part.beside), text))
        return found

    def memory(self, stage: int) -> Iterator[tuple[float, float]]:
        """Yield (seconds, bytes) of a rank of a stage: at the start and the end of each layer."""
        simulation = self.simulation
        problem, plan = simulation.problem, simulation.plan
        passes = {
            (chunk, kind): self.parts(chunk, kind) for chunk in problem.own(stage) for kind in KINDS
        }
        every = [(chunk, part) for (chunk, kind), parts in passes.items() for part in parts]
        alive = dict(zip(problem.own(stage), problem.alive(stage), strict=True))
        most = sum(alive[chunk] * part.kept for chunk, part in every) / len(KINDS)
        # The state is what the search counts beside activations and working memory.
        state = plan.stages[stage].memory - most - max(part.work for _, part in every)
        now = state + simulation.buffers
        yield 0.0, now
        for action, start, _ in simulation.step.timeline.spans[stage]:
            clock, sign = start, 1 if action.kind == "forward" else -1
            for part in passes[action.chunk, action.kind]:
                yield clock, now + part.work
                clock += sum(part.seconds.values())
                yield clock, now + part.work
                now += sign * part.kept
                yield clock, now
        yield simulation.step.seconds, now
