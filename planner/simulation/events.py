"""Events of a rank within a pass, and its memory over a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...models.accounting.state import device_bytes
from ...trainer.layout.schedules import Kind
from ..division.problem import FixedCosts
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
    layer_kind: int | None
    """None: the embedding or the head."""
    seconds: dict[str, float]
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
        names = [layer.name for layer in self.simulation.costs.kinds]
        found = []
        if chunk == 0:
            found.append(self._end("embedding", problem.first, kind))
        for layer in range(*problem.ranges(plan.cuts)[chunk]):
            choice, layer_kind = plan.choices[layer], problem.layers[layer]
            way = choice.name
            seconds = way.forward if kind == "forward" else way.backward
            beside = self.messages.beside(layer_kind, way, kind)
            text = f"layer {layer}, {names[layer_kind]}"
            found.append(Part(text, layer_kind, dict(seconds), beside))
        if chunk == problem.all_chunks - 1:
            found.append(self._end("head and loss", problem.last, kind))
        return found if kind == "forward" else found[::-1]

    def _end(self, text: str, fixed: FixedCosts, kind: Kind) -> Part:
        seconds = fixed.forward if kind == "forward" else fixed.backward
        return Part(text, None, {"ends": seconds}, 0.0)

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
        """Yield (seconds, bytes) of a rank of a stage: the highest level of each layer while it
        runs, then the level that it leaves."""
        simulation = self.simulation
        moments = iter(simulation.moments[stage])
        yield 0.0, device_bytes(next(moments).end)
        clock = 0.0
        for action, start, _ in simulation.step.timeline.spans[stage]:
            clock = start
            lengths = [sum(p.seconds.values()) for p in self.parts(action.chunk, action.kind)]
            for length in [*lengths, *([0.0] if action.kind == "backward" else [])]:
                moment = next(moments)
                yield clock, device_bytes(moment.high)
                clock += length
                yield clock, device_bytes(moment.high)
                yield clock, device_bytes(moment.end)
        update = next(moments)
        yield clock, device_bytes(update.high)
        yield simulation.step.seconds, device_bytes(update.end)
