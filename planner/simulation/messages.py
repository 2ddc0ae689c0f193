"""Messages of a plan's ranks, recorded while the planner's functions price them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...trainer.engines.traffic import Message
from ...trainer.layout.schedules import Kind
from ..grid.grid import Grid
from ..prices import messages
from ..prices.forms import LayerPlan
from ..prices.layers import Costs
from ..prices.machine import Machine

COLLECTIVES: Mapping[Message, str] = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_compute": "all-reduce",
}
"""Collective by engine message."""


@dataclass(frozen=True)
class RankMessage:
    """A message of a rank."""

    axis: str
    collective: str
    size: float
    """Bytes, as nccl-tests counts them (`Collective.bytes`)."""
    ranks: int
    near: int
    """Ranks of the group on a node."""
    seconds: float


class RecordingMachine(Machine):
    """A cluster that records every message that it prices."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(
            machine.hardware,
            machine.precision,
            fp8=machine.fp8,
            roofline=machine.roofline,
            program=machine.program,
        )
        self.sent: list[RankMessage] = []

    def collective(self, name: str, size: float, ranks: int, stride: int) -> float:
        seconds = super().collective(name, size, ranks, stride)
        if seconds:
            near = math.gcd(ranks, max(1, self.per_node // stride))
            self.sent.append(RankMessage("", name, size, ranks, near, seconds))
        return seconds

    def hop(self, size: float, stride: int) -> float:
        seconds = super().hop(size, stride)
        near = 2 if stride < self.per_node else 1
        self.sent.append(RankMessage("", "p2p", size, 2, near, seconds))
        return seconds


class LayerMessages:
    """Messages of a plan's layers, by kind of layer."""

    def __init__(self, costs: Costs, grid: Grid) -> None:
        self.recorder = RecordingMachine(costs.machine)
        recorded_costs = costs.replace_machine(self.recorder)
        self.engine, parameters = recorded_costs.price_engine(
            grid.engine, grid.layout.pp, grid.degrees
        )
        self.shards = parameters.layers
        self.layers = [
            [
                *self._axis_messages(recorded_costs, grid, layer_kind),
                *self._data_messages(self.shards[layer_kind]),
            ]
            for layer_kind in range(len(costs.kinds))
        ]
        """Distinct messages by kind of layer."""

    def _axis_messages(self, costs: Costs, grid: Grid, layer_kind: int) -> list[RankMessage]:
        """Return the messages over the tensor, context and expert axes."""

        def record(ep: int) -> list[RankMessage]:
            self.recorder.sent = []
            costs.price_messages(costs.kinds[layer_kind], grid.shape.split, ep)
            return self.recorder.sent

        dense, all_messages = record(1), record(grid.layout.ep)  # messages of experts come last
        tensor = ("all-gather", "reduce-scatter")
        axes = ["tensor" if message.collective in tensor else "context" for message in dense]
        axes += ["experts"] * (len(all_messages) - len(dense))
        named = (
            replace(message, axis=axis) for axis, message in zip(axes, all_messages, strict=True)
        )
        return list(dict.fromkeys(named))

    def _data_messages(self, costs: messages.ParameterCosts) -> list[RankMessage]:
        """Return the engine's messages: gathered weights and reduced gradients."""
        engine = self.engine
        near = math.gcd(engine.shard_ranks, max(1, self.recorder.per_node // engine.stride))
        return [
            RankMessage(
                "data",
                COLLECTIVES[message],
                costs.elements * engine.widths[message],
                engine.shard_ranks,
                near,
                costs.seconds[message],
            )
            for message in engine.traffic.messages
            if costs.seconds[message]
        ]

    def data_seconds(self, layer_kind: int, layer_plan: LayerPlan, kind: Kind) -> float:
        """Return the seconds of data messages during a layer's pass."""
        shards = self.shards[layer_kind]
        if kind == "forward":
            return self.engine.forward_message(shards)
        return self.engine.backward_message(shards, gathers=layer_plan.reshard is None)
