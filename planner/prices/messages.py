"""Price messages: a layer's over its axes, and an engine's.

docs/parallelism.md has the same messages by axis. Neighbours on an axis stand `stride` ranks apart:
tensor 1, context tp, data tp × cp; experts are the innermost ranks.
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
"""Bytes per number in a reduced gradient: fp32 in all engines."""
UPDATE_BYTES = 30
"""Bytes that an optimizer step reads and writes per local parameter: gradients, masters and two
moments in fp32, and weights in compute precision."""
MESSAGE_LAUNCHES = 3
"""Launches that take as long as the host's overhead per message: the autograd function, views, the
call and the wait. Measured on a CPU with messages that send nothing."""
Reshard = bool | None
"""False: weights stay gathered from the forward to the backward pass. None: as the engine."""
SCANS = ("ssd", "selective_scan", "modal")


class MessageTimes(NamedTuple):
    """Seconds that messages take in both passes."""

    forward: float
    backward: float
    saved: float = 0.0
    """Forward seconds that recomputation does not repeat if attention is saved."""


def price_layer(
    layer: LayerTrace,
    model: ModelConfig,
    trace: ModelTrace,
    precision: Precision,
    machine: Machine,
    split: Split,
    ep: int,
    rings: Mapping[tuple[int, ...], Operations],
) -> dict[str, MessageTimes]:
    """Return the seconds of a layer's messages, by axis. `rings` has operations by the attention's
    shape."""
    width = precision.weight_bytes
    tokens = split.rows * trace.seq_len / split.cp
    times: dict[str, MessageTimes] = {}
    if split.tp > 1:
        size = tokens * trace.width * width
        call = machine.collective("all-gather", size, split.tp, 1)
        call += machine.collective("reduce-scatter", size, split.tp, 1)
        # gloo gathers into a buffer of its own, from which torch copies.
        buffered = machine.hardware.file.device.kind == "cpu"
        call += _copy_seconds(size, _count_row_copies(split) + buffered, machine)
        call += _copy_seconds(size, _count_row_copies(split), machine)
        loss = (
            _price_loss(layer, tokens, machine, split)
            if layer is trace.head
            else MessageTimes(0.0, 0.0)
        )
        forward, backward = (layer.calls * call + end for end in (loss.forward, loss.backward))
        times["tensor"] = MessageTimes(forward, backward)
    if split.cp > 1:
        context = [
            (work.count, _price_ring(work, rings[work.shape], tokens, width, machine, split))
            if work.kind == "attention" and rings
            else (work.count, _price_context(work, tokens, width, machine, split))
            for work in layer.forward
        ]
        times["context"] = MessageTimes(
            *(sum(n * s[field] for n, s in context) for field in range(3))
        )
    if ep > 1:
        names = [layer.operators.get("mixer"), layer.operators.get("mlp")]
        top = sum(getattr(model.operators.get(name), "top_k", 0) for name in names if name)
        if top:
            size = top * tokens / split.tp * trace.width * width
            exchange = 2 * machine.collective("all-to-all", size, ep, 1)
            times["experts"] = MessageTimes(exchange, exchange)
    return times


def _copy_seconds(size: float, copies: int, machine: Machine) -> float:
    """Return the seconds that a rank works around a message of `size` bytes, which it copies
    `copies` times."""
    return copies * machine.traffic(2 * size) + machine.launches(MESSAGE_LAUNCHES + copies)


def _count_row_copies(split: Split) -> int:
    """Count the copies that reorder row parts. A single row's parts are contiguous."""
    return int(split.rows > 1)


def _price_loss(head: LayerTrace, tokens: float, machine: Machine, split: Split) -> MessageTimes:
    """Price the loss's messages. Logits are sharded by vocabulary: only sums over ids cross the
    axis. Plain torch computes row by row."""

    def seconds(collective: str, size: float) -> float:
        message = machine.collective(collective, size * GRADIENT_BYTES, split.tp, 1)
        return message + machine.launches(MESSAGE_LAUNCHES)

    if any(work.name == "linear_cross_entropy" for work in head.forward):
        return MessageTimes(seconds("all-gather", 3 * tokens * split.tp), seconds("all-reduce", 1))
    row = tokens / split.rows
    forward = seconds("all-reduce", row) + seconds("reduce-scatter", 2 * row)
    return MessageTimes(split.rows * forward, split.rows * seconds("all-gather", 2 * row))


def _price_ring(
    work: Work, ring: Operations, tokens: float, width: int, machine: Machine, split: Split
) -> MessageTimes:
    """Price a ring's messages: the exchange of chunks before and after it, and the exposed part of
    the hops."""
    cp, tp = split.cp, split.tp
    size, _, _, keys = work.shape
    exchange = _exchange_seconds(work, tokens, width, machine, split)
    hop = machine.ring_hop(2 * keys * size / tp * tokens * width, cp, tp)
    wide = machine.ring_hop(2 * keys * size / tp * tokens * GRADIENT_BYTES, cp, tp)
    # The last hop computes without a message, and the last gradient travels without computation.
    overlapping = (cp - 1) / cp

    def exposed(direction: Direction, message: float) -> float:
        computed = overlapping * machine.seconds(ring.select(direction), direction, Split())
        return machine.overlapped(computed, message, tp * cp) - computed

    forward = exposed("forward", (cp - 1) * hop)
    backward = exposed("backward", (cp - 1) * (hop + wide)) + wide
    return MessageTimes(exchange + forward, exchange + backward, saved=forward)


def _exchange_seconds(
    work: Work, tokens: float, width: int, machine: Machine, split: Split
) -> float:
    """Return the seconds of the all-to-all for queries, keys and values, and for the output."""
    sizes = _attention_bytes(work, tokens, width, split)
    return sum(machine.collective("all-to-all", size, split.cp, split.tp) for size in sizes)


def _attention_bytes(work: Work, tokens: float, width: int, split: Split) -> tuple[float, float]:
    """Count the bytes of a rank's queries, keys and values, and of its output."""
    size, heads, _, keys = work.shape
    token = size / split.tp * tokens * width
    return (heads + 2 * keys) * token, heads * token


def _price_context(
    work: Work, tokens: float, width: int, machine: Machine, split: Split
) -> MessageTimes:
    """Price an operation's messages over the context axis."""
    cp, tp = split.cp, split.tp
    if work.kind == "attention":
        seconds = _exchange_seconds(work, tokens, width, machine, split)
        inputs, output = _attention_bytes(work, tokens, width, split)
        copies = 1 + _count_row_copies(split)
        seconds += _copy_seconds(inputs, 1 + copies, machine)  # queries, keys, values: one tensor
        seconds += _copy_seconds(output, copies, machine)
        return MessageTimes(seconds, seconds)
    if work.kind != "kernel":
        return MessageTimes(0.0, 0.0)
    size, channels, _ = work.shape
    if work.name == "modal" and split.hyena_li == "a2a":
        seconds = _channel_exchange_seconds(4 * channels / tp * tokens * width, machine, split)
        return MessageTimes(seconds, seconds)
    if work.name in SCANS:  # a rank waits for the states of all ranks before it
        seconds = machine.chain(split.rows * channels / tp * size * 4, cp, tp)
        return MessageTimes(seconds, seconds)
    if work.name in ("short_convolution", "toeplitz"):
        halo = split.rows * channels / tp * max(1, size - 1) * width
        seconds = machine.ring_hop(halo, cp, tp)
        return MessageTimes(seconds, seconds)
    if work.name == "fft_convolution":
        seconds = _channel_exchange_seconds(2 * channels / tp * tokens * width, machine, split)
        return MessageTimes(seconds, seconds)
    return MessageTimes(0.0, 0.0)


def _channel_exchange_seconds(size: float, machine: Machine, split: Split) -> float:
    """Return the seconds of the all-to-all for a convolution's input, and for its output."""
    inputs = output = size / 2
    copies = 1 + _count_row_copies(split)
    return sum(
        machine.collective("all-to-all", part, split.cp, split.tp)
        + _copy_seconds(part, copies, machine)
        for part in (inputs, output)
    )


@dataclass(frozen=True)
class ParameterCosts:
    """Parameters of a layer or an end, and what an engine's messages for them cost."""

    elements: float
    """Local parameters before the engine shards them."""
    updated: float
    """Parameters that a rank updates."""
    seconds: Mapping[Message, float]


class EngineMessages:
    """An engine's messages in a layout, and its overhead on the host."""

    def __init__(
        self,
        engine: EngineConfig,
        layout: LayoutConfig,
        dp: int,
        precision: Precision,
        machine: Machine,
        parameters: float,
    ) -> None:
        """`parameters` counts a stage's local parameters before the engine shards them."""
        self.layout, self.machine = layout, machine
        self.traffic = engine.traffic(layout, machine.hardware.file.device.kind)
        self.widths: Mapping[Message, int] = {
            "gather": precision.weight_bytes,
            "reduce": GRADIENT_BYTES,
            "all_reduce": GRADIENT_BYTES,
            "all_reduce_compute": precision.weight_bytes,
        }
        """Bytes per element, by message."""
        self.stride = layout.tp
        self.ranks = dp * layout.cp
        self.shard = self.traffic.shard or self.ranks
        self.gather_bucket = min(parameters, self.traffic.gather_bucket)
        self.reduce_bucket = min(parameters, self.traffic.reduce_bucket)

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """Choices of a layer: gathered weights may stay whole."""
        return (None, False) if self.traffic.may_stay_unsharded else (None,)

    def price(self, shards: Shards) -> ParameterCosts:
        """Price the messages for these parameters."""
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
            if experts:  # only replicas hold the same experts
                shard, ranks = (max(1, n * self.stride // ep) for n in (shard, ranks))
                stride = max(ep, self.stride)
            send, widths = self.machine.collective, self.widths
            size = elements * widths["reduce"]
            # A layer pays its share of a bucket.
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
        return ParameterCosts(total, updated, seconds)

    def forward_message(self, costs: ParameterCosts) -> float:
        """Return the seconds of messages during a forward pass."""
        return _sum_seconds(self.traffic.forward, costs)

    def backward_message(self, costs: ParameterCosts, *, gathers: bool = True) -> float:
        """Return the seconds of messages during a backward pass that `gathers` weights."""
        return _sum_seconds(self._select_backward(gathers=gathers), costs)

    def _select_backward(self, *, gathers: bool) -> Sequence[Message]:
        messages = self.traffic.backward
        return messages if gathers else [name for name in messages if name != "gather"]

    def forward(self, busy: float, costs: ParameterCosts) -> float:
        """Return the seconds of a block's forward pass with concurrent messages."""
        host = self._host_seconds(len(self.traffic.forward))
        return self.overlap(busy + host, self.forward_message(costs))

    def backward(self, busy: float, costs: ParameterCosts, *, gathers: bool = True) -> float:
        """Return the seconds of a block's backward pass with concurrent messages."""
        [seconds] = self.backward_passes([busy], costs, gathers=gathers)
        return seconds

    def backward_passes(
        self, busy: Sequence[float], costs: ParameterCosts, *, gathers: bool = True
    ) -> list[float]:
        """Return `backward` for several passes."""
        host = self._host_seconds(len(self._select_backward(gathers=gathers)))
        message = self.backward_message(costs, gathers=gathers)
        return [self.overlap(seconds + host, message) for seconds in busy]

    def _host_seconds(self, messages: int) -> float:
        """Return the engine's overhead on the host in a block's pass, in seconds."""
        traffic = self.traffic
        return self.machine.launches(traffic.pass_launches + traffic.message_launches * messages)

    def recompute_seconds(self, rule: Rule) -> float:
        """Return the engine's overhead in a block's second forward pass, in seconds."""
        launches = self.traffic.recompute_launches
        return 0.0 if rule == "none" else self.machine.launches(launches)

    def overlap(self, busy: float, message: float) -> float:
        """Return the seconds of a pass and a concurrent message."""
        return self.machine.overlapped(busy, message, self.stride * self.shard)

    def update(self, forward: float, backward: float, costs: ParameterCosts) -> float:
        """Return the seconds outside the passes, once per step."""
        traffic = self.traffic
        seconds = self.machine.traffic(UPDATE_BYTES * costs.updated)
        num_messages = len(traffic.first_forward) + len(traffic.last_backward)
        if num_messages:
            seconds += self.machine.launches(traffic.message_launches * num_messages)
            for busy, messages in (
                (forward, traffic.first_forward),
                (backward, traffic.last_backward),
            ):
                seconds += self.overlap(busy, _sum_seconds(messages, costs)) - busy
        for name in traffic.update:
            seconds += costs.seconds[name]
        return seconds


def _sum_seconds(messages: Sequence[Message], costs: ParameterCosts) -> float:
    return sum((costs.seconds[name] for name in messages), 0.0)
