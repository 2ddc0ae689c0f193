"""A rank's events within a pass, and its memory over a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...models.accounting.state import device_bytes
from ...trainer.layout.schedules import Kind
from ..division.problem import FixedCosts
from .messages import LayerMessages
from .step import Simulation

KINDS: tuple[Kind, ...] = ("forward", "backward")
ORDER = ("tensor", "context", "experts", "recompute", "compute", "ends", "data")
"""Lanes of a layer's pass as drawn; a real layer alternates between them. `data` is the wait for
messages that no computation hides."""
HIDDEN = "hidden"
"""Lane of data messages, which run while other lanes do."""


class Event(NamedTuple):
    """Work or messages on a rank."""

    lane: str
    """Lane of ORDER, or HIDDEN."""
    start: float
    end: float
    text: str


class LayerPass(NamedTuple):
    """A layer's, the embedding's or the head's share in a pass."""

    text: str
    layer_kind: int | None
    """None: the embedding or the head."""
    seconds: dict[str, float]
    """Seconds by lane."""
    data_seconds: float
    """Seconds of data messages that run at the same time."""


class Events:
    """Events in the passes of a plan."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.messages = LayerMessages(simulation.costs, simulation.grid)

    def layer_passes(self, chunk: int, kind: Kind) -> list[LayerPass]:
        """Return a pass's layers in the order in which they run."""
        problem, plan = self.simulation.problem, self.simulation.plan
        names = [layer.name for layer in self.simulation.costs.kinds]
        layer_passes = []
        if chunk == 0:
            layer_passes.append(self._end("embedding", problem.first, kind))
        for layer in range(*problem.ranges(plan.cuts)[chunk]):
            choice, layer_kind = plan.choices[layer], problem.layers[layer]
            layer_plan = choice.name
            seconds = layer_plan.forward if kind == "forward" else layer_plan.backward
            data_seconds = self.messages.data_seconds(layer_kind, layer_plan, kind)
            text = f"layer {layer}, {names[layer_kind]}"
            layer_passes.append(LayerPass(text, layer_kind, dict(seconds), data_seconds))
        if chunk == problem.all_chunks - 1:
            layer_passes.append(self._end("head and loss", problem.last, kind))
        return layer_passes if kind == "forward" else layer_passes[::-1]

    def _end(self, text: str, fixed: FixedCosts, kind: Kind) -> LayerPass:
        seconds = fixed.forward if kind == "forward" else fixed.backward
        return LayerPass(text, None, {"ends": seconds}, 0.0)

    def micro_batch_events(self, chunk: int) -> list[Event]:
        """Return a micro-batch's events in a chunk: forward pass, then backward pass."""
        events, clock = [], 0.0
        for kind in KINDS:
            for layer_pass in self.layer_passes(chunk, kind):
                label, start = f"{layer_pass.text}, {kind}", clock
                for lane in ORDER:
                    if seconds := layer_pass.seconds.get(lane, 0.0):
                        text = f"{label}: {lane} {seconds * 1e3:.3g} ms"
                        events.append(Event(lane, clock, clock + seconds, text))
                        clock += seconds
                if seconds := layer_pass.data_seconds:
                    text = f"{label}: data messages {seconds * 1e3:.3g} ms"
                    events.append(Event(HIDDEN, start, min(clock, start + seconds), text))
        return events

    def memory(self, stage: int) -> Iterator[tuple[float, float]]:
        """Yield (seconds, bytes) over a step on a rank of this stage.

        While a layer runs, its highest level counts; then the level that it leaves.
        """
        simulation = self.simulation
        moments = iter(simulation.moments[stage])
        yield 0.0, device_bytes(next(moments).end)
        clock = 0.0
        for action, start, _ in simulation.step.timeline.spans[stage]:
            clock = start
            layer_passes = self.layer_passes(action.chunk, action.kind)
            durations = [sum(layer_pass.seconds.values()) for layer_pass in layer_passes]
            for duration in [*durations, *([0.0] if action.kind == "backward" else [])]:
                moment = next(moments)
                yield clock, device_bytes(moment.high)
                clock += duration
                yield clock, device_bytes(moment.high)
                yield clock, device_bytes(moment.end)
        update = next(moments)
        yield clock, device_bytes(update.high)
        yield simulation.step.seconds, device_bytes(update.end)
