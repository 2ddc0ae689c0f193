"""Messages of a plan's ranks: recorded while the planner's own functions price them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...trainer.engines.traffic import Message
from ...trainer.layout.schedules import Kind
from ..grid.grid import Grid
from ..prices import messages
from ..prices.forms import Way
from ..prices.layers import Costs
from ..prices.machine import Machine

COLLECTIVES: Mapping[Message, str] = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_compute": "all-reduce",
}
"""Collective of each message of an engine."""


@dataclass(frozen=True)
class Sent:
    """One message of a rank."""

    axis: str
    collective: str
    size: float
    """Bytes, as nccl-tests counts them (`Collective.bytes`)."""
    ranks: int
    near: int
    """Ranks of the group on each node."""
    seconds: float


class Recorder(Machine):
    """A cluster that records the messages whose seconds it is asked for."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(
            machine.hardware, machine.precision, fp8=machine.fp8, roofline=machine.roofline
        )
        self.sent: list[Sent] = []

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        seconds = super().collective(name, size, ranks, stride)
        if seconds:
            near = math.gcd(ranks, max(1, self.per_node // stride))
            self.sent.append(Sent("", name, size, ranks, near, seconds))
        return seconds

    def hop(self, size: float, stride: int) -> float:
        seconds = super().hop(size, stride)
        near = 2 if stride < self.per_node else 1
        self.sent.append(Sent("", "p2p", size, 2, near, seconds))
        return seconds


class Messages:
    """Messages of the layers of a plan, by kind of layer."""

    def __init__(self, costs: Costs, grid: Grid) -> None:
        self.recorder = Recorder(costs.machine)
        here = costs.on(self.recorder)
        self.engine, sharded = here.sharded(grid.engine, grid.layout.pp, grid.degrees)
        self.shards = sharded.layers
        self.layers = [
            [*self._of_axes(here, grid, layer_kind), *self._of_data(self.shards[layer_kind])]
            for layer_kind in range(len(costs.kinds))
        ]
        """Different messages of each kind of layer."""

    def _of_axes(self, costs: Costs, grid: Grid, layer_kind: int) -> list[Sent]:
        """Return the messages over the tensor, context and expert axes."""
        found: list[list[Sent]] = []
        for ep in (1, grid.layout.ep):  # the second time, those of experts come last
            self.recorder.sent = []
            costs.sent(costs.kinds[layer_kind], grid.shape.split, ep)
            found.append(self.recorder.sent)
        dense, every = found
        tensor = ("all-gather", "reduce-scatter")
        axes = ["tensor" if sent.collective in tensor else "context" for sent in dense]
        axes += ["experts"] * (len(every) - len(dense))
        named = (_named(axis, sent) for axis, sent in zip(axes, every, strict=True))
        return list(dict.fromkeys(named))

    def _of_data(self, costs: messages.Sharded) -> list[Sent]:
        """Return the messages of the engine: gathered weights and reduced gradients."""
        engine = self.engine
        near = math.gcd(engine.shard, max(1, self.recorder.per_node // engine.stride))
        return [
            Sent(
                "data",
                COLLECTIVES[message],
                costs.elements * engine.widths[message],
                engine.shard,
                near,
                costs.seconds[message],
            )
            for message in engine.traffic.messages
            if costs.seconds[message]
        ]

    def beside(self, layer_kind: int, way: Way, kind: Kind) -> float:
        """Return the seconds of the data messages that run beside a pass of a layer."""
        shards = self.shards[layer_kind]
        if kind == "forward":
            return self.engine.forward_message(shards)
        return self.engine.backward_message(shards, gathers=way.reshard is None)


def _named(axis: str, sent: Sent) -> Sent:
    return Sent(axis, sent.collective, sent.size, sent.ranks, sent.near, sent.seconds)
