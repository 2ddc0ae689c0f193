"""Seconds of messages: those of a layer over its axes, and those of an engine.

docs/parallelism.md has the same messages by axis. Ranks of an axis stand `stride` apart: tensor 1,
context tp, data tp × cp; experts are the innermost ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...models.accounting.state import Shards
from ...models.config.options.precision import Precision
from ...models.config.options.recompute import Rule
from ...trainer.engines.config import EngineConfig
from ...trainer.engines.traffic import MESSAGES, Message
from ...trainer.layout.config import LayoutConfig
from ..grid.split import Direction, Split
from ..traces.ring import Operations
from ..traces.trace import LayerTrace, ModelTrace
from ..traces.work import Work
from .machine import Machine

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig

GRADIENT_BYTES = 4
"""Bytes of a reduced gradient: fp32 in all engines."""
UPDATE_BYTES = 30
"""Bytes that an optimizer step reads and writes for each parameter of a rank: gradients, masters
and two moments in fp32, and the weights that compute."""
SENT_LAUNCHES = 3
"""Launches that take as long as the host's own work for a message of a layer: the function of the
gradients, views, the call and the wait. Measured on a CPU with messages that send nothing."""
Reshard = bool | None
"""False: weights stay gathered from the forward to the backward pass. None: as the engine."""
SCANS = ("ssd", "selective_scan", "modal")


class Sent(NamedTuple):
    """Seconds of messages in both passes of a layer."""

    forward: float
    backward: float
    saved: float = 0.0
    """Seconds of the forward pass that recomputation does not repeat where attention is saved."""


def price_layer(
    layer: LayerTrace,
    model: ModelConfig,
    trace: ModelTrace,
    precision: Precision,
    machine: Machine,
    split: Split,
    ep: int,
    rings: Mapping[tuple[int, ...], Operations],
) -> dict[str, Sent]:
    """Return the seconds of a layer's messages, by axis. `rings` have a ring's operations, by the
    shape of its attention."""
    width = precision.weight_bytes
    tokens = split.rows * trace.seq_len / split.cp
    sent: dict[str, Sent] = {}
    if split.tp > 1:
        size = tokens * trace.width * width
        call = machine.collective("all-gather", size, split.tp, 1)
        call += machine.collective("reduce-scatter", size, split.tp, 1)
        # gloo gathers into a buffer of its own, from which torch copies.
        buffered = machine.hardware.file.device.kind == "cpu"
        call += _around(size, _ordered(split) + buffered, machine)
        call += _around(size, _ordered(split), machine)
        loss = _loss(layer, tokens, machine, split) if layer is trace.head else Sent(0.0, 0.0)
        forward, backward = (layer.calls * call + end for end in (loss.forward, loss.backward))
        sent["tensor"] = Sent(forward, backward)
    if split.cp > 1:
        context = [
            (work.count, _ring(work, rings[work.shape], tokens, width, machine, split))
            if work.kind == "attention" and rings
            else (work.count, _context(work, tokens, width, machine, split))
            for work in layer.forward
        ]
        sent["context"] = Sent(*(sum(n * s[field] for n, s in context) for field in range(3)))
    if ep > 1:
        names = [layer.operators.get("mixer"), layer.operators.get("mlp")]
        top = sum(getattr(model.operators.get(name), "top_k", 0) for name in names if name)
        if top:
            size = top * tokens / split.tp * trace.width * width
            exchange = 2 * machine.collective("all-to-all", size, ep, 1)
            sent["experts"] = Sent(exchange, exchange)
    return sent


def _around(size: float, copies: int, machine: Machine) -> float:
    """Return the seconds of a rank's own work around a message of `size` bytes, whose tensors are
    copied so often before and after it."""
    return copies * machine.traffic(2 * size) + machine.launches(SENT_LAUNCHES + copies)


def _ordered(split: Split) -> int:
    """Return the copies that put parts of rows in order: one row's lie one after the other."""
    return int(split.rows > 1)


def _loss(head: LayerTrace, tokens: float, machine: Machine, split: Split) -> Sent:
    """Return the seconds of the messages of the loss, whose logits are sharded by the vocabulary:
    only sums over ids cross the axis. Plain torch computes one row after the other."""

    def seconds(collective: str, size: float) -> float:
        sent = machine.collective(collective, size * GRADIENT_BYTES, split.tp, 1)
        return sent + machine.launches(SENT_LAUNCHES)

    if any(work.name == "linear_cross_entropy" for work in head.forward):
        return Sent(seconds("all-gather", 3 * tokens * split.tp), seconds("all-reduce", 1))
    row = tokens / split.rows
    forward = seconds("all-reduce", row) + seconds("reduce-scatter", 2 * row)
    return Sent(split.rows * forward, split.rows * seconds("all-gather", 2 * row))


def _ring(
    work: Work, ring: Operations, tokens: float, width: int, machine: Machine, split: Split
) -> Sent:
    """Return the seconds of a ring's messages: the exchange of chunks before and after it, and what
    its operations do not hide of the hops."""
    cp, tp = split.cp, split.tp
    size, _, _, keys = work.shape
    exchange = _exchanged(work, tokens, width, machine, split)
    hop = machine.ring_hop(2 * keys * size / tp * tokens * width, cp, tp)
    wide = machine.ring_hop(2 * keys * size / tp * tokens * GRADIENT_BYTES, cp, tp)
    # No message is beside the last hop's operations, and none beside the last gradient's message.
    overlapping = (cp - 1) / cp

    def exposed(direction: Direction, message: float) -> float:
        computed = overlapping * machine.seconds(ring.select(direction), direction, Split())
        return machine.overlapped(computed, message, tp * cp) - computed

    forward = exposed("forward", (cp - 1) * hop)
    backward = exposed("backward", (cp - 1) * (hop + wide)) + wide
    return Sent(exchange + forward, exchange + backward, saved=forward)


def _exchanged(work: Work, tokens: float, width: int, machine: Machine, split: Split) -> float:
    """Return the seconds in which queries, keys and values change ranks, and then the output."""
    sizes = _attention_bytes(work, tokens, width, split)
    return sum(machine.collective("all-to-all", size, split.cp, split.tp) for size in sizes)


def _attention_bytes(work: Work, tokens: float, width: int, split: Split) -> tuple[float, float]:
    """Return the bytes of a rank's queries, keys and values, and of its output."""
    size, heads, _, keys = work.shape
    token = size / split.tp * tokens * width
    return (heads + 2 * keys) * token, heads * token


def _context(work: Work, tokens: float, width: int, machine: Machine, split: Split) -> Sent:
    """Return the seconds of the messages of one operation over the context axis."""
    cp, tp = split.cp, split.tp
    if work.kind == "attention":
        seconds = _exchanged(work, tokens, width, machine, split)
        inputs, output = _attention_bytes(work, tokens, width, split)
        copies = 1 + _ordered(split)
        seconds += _around(inputs, 1 + copies, machine)  # queries, keys, values: one tensor
        seconds += _around(output, copies, machine)
        return Sent(seconds, seconds)
    if work.kind != "kernel":
        return Sent(0.0, 0.0)
    size, channels, _ = work.shape
    if work.name == "modal" and split.hyena_li == "a2a":
        seconds = _by_channels(4 * channels / tp * tokens * width, machine, split)
        return Sent(seconds, seconds)
    if work.name in SCANS:  # a rank waits for the states of all ranks before it
        seconds = machine.chain(split.rows * channels / tp * size * 4, cp, tp)
        return Sent(seconds, seconds)
    if work.name in ("short_convolution", "toeplitz"):
        halo = split.rows * channels / tp * max(1, size - 1) * width
        seconds = machine.ring_hop(halo, cp, tp)
        return Sent(seconds, seconds)
    if work.name == "fft_convolution":
        seconds = _by_channels(2 * channels / tp * tokens * width, machine, split)
        return Sent(seconds, seconds)
    return Sent(0.0, 0.0)


def _by_channels(size: float, machine: Machine, split: Split) -> float:
    """Return the seconds in which a convolution's input changes ranks, and then its output."""
    inputs = output = size / 2
    copies = 1 + _ordered(split)
    return sum(
        machine.collective("all-to-all", part, split.cp, split.tp) + _around(part, copies, machine)
        for part in (inputs, output)
    )


@dataclass(frozen=True)
class Sharded:
    """Parameters of a layer, and the seconds of an engine's messages for them."""

    elements: float
    """Parameters of a rank before the engine shards them."""
    updated: float
    """Parameters that a rank updates."""
    seconds: Mapping[Message, float]


class EngineMessages:
    """Messages of an engine on some ranks, and its own work on the host."""

    def __init__(
        self,
        engine: EngineConfig,
        layout: LayoutConfig,
        dp: int,
        precision: Precision,
        machine: Machine,
        parameters: float,
    ) -> None:
        """`parameters` are those of a rank before the engine shards them."""
        self.layout, self.machine = layout, machine
        self.traffic = engine.traffic(layout, machine.hardware.file.device.kind)
        self.widths: Mapping[Message, int] = {
            "gather": precision.weight_bytes,
            "reduce": GRADIENT_BYTES,
            "all_reduce": GRADIENT_BYTES,
            "all_reduce_compute": precision.weight_bytes,
        }
        """Bytes of an element of each message."""
        self.stride = layout.tp
        self.ranks = dp * layout.cp
        self.shard = self.traffic.shard or self.ranks
        self.gather_bucket = min(parameters, self.traffic.gather_bucket)
        self.reduce_bucket = min(parameters, self.traffic.reduce_bucket)

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """Choices of a layer: the weights that are gathered for a pass may stay whole."""
        return (None, False) if self.traffic.may_stay_whole else (None,)

    def of(self, shards: Shards) -> Sharded:
        """Return the costs of these parameters."""
        ep = self.layout.ep
        seconds: dict[Message, float] = dict.fromkeys(MESSAGES, 0.0)
        total = updated = 0.0
        for experts in (False, True):
            elements = sum(
                math.prod(shard.local) for shard in shards.values() if shard.experts == experts
            )
            if not elements:
                continue
            shard, ranks = self.shard, self.ranks
            stride = self.stride
            if experts:  # replicas alone hold the same ones
                shard, ranks = (max(1, n * self.stride // ep) for n in (shard, ranks))
                stride = max(ep, self.stride)
            send, widths = self.machine.collective, self.widths
            size = elements * widths["reduce"]
            # A layer has its part of the time of a bucket.
            gathered = max(elements, self.gather_bucket)
            reduced = max(elements, self.reduce_bucket)
            bucket = gathered * widths["gather"]
            seconds["gather"] += elements / gathered * send("all-gather", bucket, shard, stride)
            seconds["reduce"] += send("reduce-scatter", size, shard, stride)
            seconds["reduce"] += send("all-reduce", size / shard, ranks // shard, stride * shard)
            sums: tuple[Message, ...] = ("all_reduce", "all_reduce_compute")
            for name in sums:
                bucket = reduced * widths[name]
                seconds[name] += elements / reduced * send("all-reduce", bucket, ranks, stride)
            total += elements
            updated += elements / (1 if self.traffic.updates_all else shard)
        return Sharded(total, updated, seconds)

    def forward_message(self, costs: Sharded) -> float:
        """Return the seconds of the messages beside a forward pass."""
        return _seconds(self.traffic.forward, costs)

    def backward_message(self, costs: Sharded, *, gathers: bool = True) -> float:
        """Return the seconds of the messages beside a backward pass, which `gathers` weights."""
        return _seconds(self._backward(gathers=gathers), costs)

    def _backward(self, *, gathers: bool) -> Sequence[Message]:
        messages = self.traffic.backward
        return messages if gathers else [name for name in messages if name != "gather"]

    def forward(self, busy: float, costs: Sharded) -> float:
        """Return the seconds of a forward pass of a block, with the messages beside it."""
        host = self._host(len(self.traffic.forward))
        return self.together(busy + host, self.forward_message(costs))

    def backward(self, busy: float, costs: Sharded, *, gathers: bool = True) -> float:
        """Return the seconds of a backward pass of a block, with the messages beside it."""
        [seconds] = self.backwards([busy], costs, gathers=gathers)
        return seconds

    def backwards(
        self, busy: Sequence[float], costs: Sharded, *, gathers: bool = True
    ) -> list[float]:
        """Return `backward` of several passes of a block."""
        host = self._host(len(self._backward(gathers=gathers)))
        message = self.backward_message(costs, gathers=gathers)
        return [self.together(seconds + host, message) for seconds in busy]

    def _host(self, messages: int) -> float:
        """Return the seconds of the engine's own work on the host in a pass of a block."""
        traffic = self.traffic
        return self.machine.launches(traffic.pass_launches + traffic.message_launches * messages)

    def again(self, rule: Rule) -> float:
        """Return the seconds of the engine's own work in the second forward pass of a block."""
        launches = self.traffic.recompute_launches
        return 0.0 if rule == "none" else self.machine.launches(launches)

    def together(self, busy: float, message: float) -> float:
        """Return the seconds of a pass and the messages beside it."""
        return self.machine.overlapped(busy, message, self.stride * self.shard)

    def update(self, forward: float, backward: float, costs: Sharded) -> float:
        """Return the seconds of a step outside its passes."""
        traffic = self.traffic
        seconds = self.machine.traffic(UPDATE_BYTES * costs.updated)
        sent = len(traffic.first_forward) + len(traffic.last_backward)
        if sent:
            seconds += self.machine.launches(traffic.message_launches * sent)
            for busy, messages in (
                (forward, traffic.first_forward),
                (backward, traffic.last_backward),
            ):
                seconds += self.together(busy, _seconds(messages, costs)) - busy
        for name in traffic.update:
            seconds += costs.seconds[name]
        return seconds


def _seconds(messages: Sequence[Message], costs: Sharded) -> float:
    return sum((costs.seconds[name] for name in messages), 0.0)
