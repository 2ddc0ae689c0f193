"""Seconds of messages: a layer's over its axes, and an engine's for weights and gradients.

docs/parallelism.md lists the messages by axis. Neighbours on an axis stand `stride` ranks apart: 1
on the tensor axis, tp on the context axis, tp among data ranks. Experts are split over the
innermost ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...models.accounting.state import Shards
from ...models.config.options.mla import MLAOptions
from ...models.config.options.precision import Precision
from ...models.config.options.recompute import Rule
from ...trainer.engines.config import EngineConfig
from ...trainer.engines.traffic import MESSAGES, Message
from ...trainer.layout.config import LayoutConfig
from ..grid.split import Direction, Split
from ..traces.ring import Operations
from ..traces.trace import LayerTrace, ModelTrace
from ..traces.work import Work
from .experts import price_exchange
from .host import price_host_copy, price_optimizer
from .latents import count_ring_channels, find_latents, price_latents
from .machine import MESSAGE_LAUNCHES, Machine

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig

GRADIENT_BYTES = 4
"""Bytes per number in a message of gradients of activations or sums: fp32."""
MASTER_BYTES = 4
"""Bytes per number in a master: fp32 in all engines."""
Reshard = bool | None
"""False: weights stay gathered from the forward to the backward pass. None: as the engine."""
SCANS = ("ssd", "selective_scan", "modal", "delta")
"""Kernels that pass a state from rank to rank of the context axis."""
CONVOLUTIONS = ("short_convolution", "toeplitz")
"""Kernels that read the last tokens of the rank before theirs."""


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
    """Return the seconds of a layer's messages, by axis. `rings` has the operations of ring
    attention by the attention's shape; without it, attention exchanges heads for tokens."""
    prices = _LayerMessages(
        machine, split, split.rows * trace.seq_len / split.cp, precision.weight_bytes
    )
    times: dict[str, MessageTimes] = {}
    if split.tp > 1:
        times["tensor"] = prices.price_tensor(layer, trace)
    if split.cp > 1:
        works = []
        for work in layer.forward:
            latents = find_latents(work, layer, model, split)
            if work.kind == "attention" and rings:
                works.append((work.count, prices.price_ring(work, rings[work.shape], latents)))
            else:
                works.append((work.count, prices.price_context(work, latents)))
        times["context"] = MessageTimes(
            *(sum(count * parts[n] for count, parts in works) for n in range(len(works[0][1])))
        )
    if ep > 1:
        names = [layer.operators.get("mixer"), layer.operators.get("mlp")]
        top_k = sum(getattr(model.operators.get(name), "top_k", 0) for name in names if name)
        if top_k:
            size = top_k * prices.tokens / split.tp * trace.width * prices.number_bytes
            seconds = price_exchange(machine, size, top_k, ep)  # to the experts, and back
            times["experts"] = MessageTimes(seconds, seconds)
    return times


class _LayerMessages(NamedTuple):
    """Prices the messages of a rank for a layer and a micro-batch."""

    machine: Machine
    split: Split
    tokens: float
    """Tokens of the micro-batch per context rank."""
    number_bytes: int
    """Bytes per number of an activation."""

    def price_tensor(self, layer: LayerTrace, trace: ModelTrace) -> MessageTimes:
        """Price the gather before every operator, the reduce-scatter after it, and the loss."""
        machine, split = self.machine, self.split
        numbers = self.tokens * trace.width
        size = numbers * self.number_bytes
        gathered = numbers * (machine.program.tensor_gather_bytes or self.number_bytes)
        seconds = machine.collective("all-gather", gathered, split.tp, 1)
        seconds += machine.collective("reduce-scatter", size, split.tp, 1)
        seconds *= machine.exposed(asynchronous=machine.program.async_tensor)
        # gloo gathers into a buffer of its own, from which torch copies.
        is_buffered = machine.hardware.file.device.kind == "cpu"
        seconds += self.machine.message_copies(size, self._num_row_copies + is_buffered)
        seconds += self.machine.message_copies(size, self._num_row_copies)
        loss = MessageTimes(0.0, 0.0)
        if layer is trace.head:
            loss = self._price_loss(layer)
        return MessageTimes(
            layer.calls * seconds + loss.forward, layer.calls * seconds + loss.backward
        )

    def _price_loss(self, head: LayerTrace) -> MessageTimes:
        """Price the loss's messages. Logits are sharded by vocabulary: only sums over ids cross the
        axis. Plain torch computes row by row."""
        rows, tp, tokens = self.split.rows, self.split.tp, self.tokens

        def seconds(collective: str, numbers: float) -> float:
            message = self.machine.collective(collective, numbers * GRADIENT_BYTES, tp, 1)
            return message + self.machine.host(MESSAGE_LAUNCHES)

        if any(work.name == "linear_cross_entropy" for work in head.forward):
            return MessageTimes(seconds("all-gather", 3 * tokens * tp), seconds("all-reduce", 1))
        row_tokens = tokens / rows
        forward = seconds("all-reduce", row_tokens) + seconds("reduce-scatter", 2 * row_tokens)
        return MessageTimes(rows * forward, rows * seconds("all-gather", 2 * row_tokens))

    def price_ring(self, work: Work, ring: Operations, latents: MLAOptions | None) -> MessageTimes:
        """Price ring attention: the exchange of chunks before and after the ring, and the part of
        its hops that computation does not hide."""
        machine, cp, tp = self.machine, self.split.cp, self.split.tp
        channels = count_ring_channels(work, latents, tp)
        numbers = channels.travelling * self.tokens
        exchange = sum(
            machine.collective("all-to-all", count * self.tokens * self.number_bytes, cp, tp)
            for count in (channels.inputs, channels.outputs)
        )
        hop = machine.ring_hop(numbers * self.number_bytes, cp, tp)
        gradient_hop = machine.ring_hop(numbers * GRADIENT_BYTES, cp, tp)

        def exposed_seconds(direction: Direction, message: float) -> float:
            # Of cp steps, the last one computes without a message.
            compute = (cp - 1) / cp * machine.seconds(ring.select(direction), direction, Split())
            return machine.overlapped(compute, message, tp * cp) - compute

        forward = exposed_seconds("forward", (cp - 1) * hop)
        # Gradients travel once more than keys and values: to their rank, after all computation.
        backward = exposed_seconds("backward", (cp - 1) * (hop + gradient_hop)) + gradient_hop
        return MessageTimes(exchange + forward, exchange + backward, saved=forward)

    def price_context(self, work: Work, latents: MLAOptions | None) -> MessageTimes:
        """Price an operation's messages over the context axis: equal in both passes, unless
        attention exchanges latents."""
        if latents is not None:
            size = self.tokens * self.number_bytes
            return MessageTimes(*price_latents(self.machine, self.split, latents, size))
        seconds = self._context_seconds(work)
        return MessageTimes(seconds, seconds)

    def _context_seconds(self, work: Work) -> float:
        machine, split, tokens = self.machine, self.split, self.tokens
        if work.kind == "attention":
            inputs, output = self._attention_bytes(work)
            seconds = sum(
                machine.collective("all-to-all", size, split.cp, split.tp)
                for size in (inputs, output)
            )
            copies = 1 + self._num_row_copies
            seconds += self.machine.message_copies(
                inputs, 1 + copies
            )  # queries, keys, values: one tensor
            return seconds + self.machine.message_copies(output, copies)
        if work.kind != "kernel":
            return 0.0
        size, channels, _ = work.shape  # size: numbers in a channel's state, or taps
        forms = {"modal": split.hyena_li, "delta": split.delta}
        if forms.get(work.name) == "a2a":
            return self._channel_exchange_seconds(
                4 * channels / split.tp * tokens * self.number_bytes
            )
        if work.name in SCANS:
            state = split.rows * channels / split.tp * size * 4
            if work.name == "delta":  # a transition matrix, if values are as wide as keys
                state *= 2
            return machine.chain(state, split.cp, split.tp)
        if work.name in CONVOLUTIONS:
            halo = split.rows * channels / split.tp * max(1, size - 1) * self.number_bytes
            return machine.ring_hop(halo, split.cp, split.tp)
        if work.name == "fft_convolution":
            return self._channel_exchange_seconds(
                2 * channels / split.tp * tokens * self.number_bytes
            )
        return 0.0

    def _attention_bytes(self, work: Work) -> tuple[float, float]:
        """Count the bytes of a rank's queries, keys and values, and of its output."""
        head_width, heads, _, kv_heads = work.shape
        head_bytes = head_width / self.split.tp * self.tokens * self.number_bytes
        return (heads + 2 * kv_heads) * head_bytes, heads * head_bytes

    def _channel_exchange_seconds(self, size: float) -> float:
        """Return the seconds of the all-to-all for a convolution's input, and for its output, which
        have `size` bytes together."""
        split = self.split
        inputs = output = size / 2
        copies = 1 + self._num_row_copies
        return sum(
            self.machine.collective("all-to-all", part, split.cp, split.tp)
            + self.machine.message_copies(part, copies)
            for part in (inputs, output)
        )

    @property
    def _num_row_copies(self) -> int:
        """Copies that reorder parts of rows; those of a single row are contiguous."""
        return int(self.split.rows > 1)


@dataclass(frozen=True)
class ParameterCosts:
    """Parameters of a layer or an end, and the seconds of an engine's messages for them."""

    elements: float
    """Local parameters before the engine shards them."""
    updated: float
    """Parameters that a rank updates."""
    seconds: Mapping[Message, float]
    """For one message of every kind, whether or not the engine sends it."""


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
        program = machine.program
        self.widths: Mapping[Message, int] = {
            "gather": program.gather_bytes or precision.weight_bytes,
            "reduce": program.gradient_bytes,
            "all_reduce": program.gradient_bytes,
            "all_reduce_compute": precision.weight_bytes,
        }
        """Bytes per element, by message."""
        self.stride = layout.tp
        self.data_ranks = dp * layout.cp
        device = machine.hardware.file.device.kind
        self.traffic = engine.for_ranks(self.data_ranks).traffic(layout, device)
        self.shard_ranks = self.traffic.shard or self.data_ranks
        """Ranks that share a copy of the state."""
        self.gather_bucket = min(parameters, self.traffic.gather_bucket)
        self.reduce_bucket = min(parameters, self.traffic.reduce_bucket)

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """Choices of a layer: gathered weights may stay whole."""
        return (None, False) if self.traffic.may_stay_unsharded else (None,)

    def price(self, shards: Shards) -> ParameterCosts:
        """Price every kind of message for these parameters."""
        ep = self.layout.ep
        seconds: dict[Message, float] = dict.fromkeys(MESSAGES, 0.0)
        total = updated = 0.0
        for experts in (False, True):
            elements = sum(
                math.prod(shard.local) for shard in shards.values() if shard.experts == experts
            )
            if not elements:
                continue
            shard_ranks, data_ranks, stride = self.shard_ranks, self.data_ranks, self.stride
            if experts:  # only replicas hold the same experts
                shard_ranks = max(1, shard_ranks * self.stride // ep)
                data_ranks = max(1, data_ranks * self.stride // ep)
                stride = max(ep, self.stride)
            send, widths = self.machine.collective, self.widths
            # A message for a bucket serves several layers, which share its seconds by elements.
            gathered = max(elements, self.gather_bucket)
            size = gathered * widths["gather"]
            seconds["gather"] += elements / gathered * send("all-gather", size, shard_ranks, stride)
            size = elements * widths["reduce"]
            seconds["reduce"] += send("reduce-scatter", size, shard_ranks, stride)
            copies, shard_stride = data_ranks // shard_ranks, stride * shard_ranks
            seconds["reduce"] += send("all-reduce", size / shard_ranks, copies, shard_stride)
            reduced = max(elements, self.reduce_bucket)
            sums: tuple[Message, ...] = ("all_reduce", "all_reduce_compute")
            for name in sums:
                size = reduced * widths[name]
                seconds[name] += elements / reduced * send("all-reduce", size, data_ranks, stride)
            size = elements / shard_ranks * MASTER_BYTES
            for message in MESSAGES if self.traffic.on_host else ():
                seconds[message] += price_host_copy(self.machine, self.traffic, message, size)
            if self.data_ranks == 1:
                for message, width in self._copied_bytes.items():
                    seconds[message] += self.machine.traffic(width * elements)
            total += elements
            updated += elements / (1 if self.traffic.updates_all else shard_ranks)
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
        """Return the seconds of a block's forward pass beside its messages. `busy` are the seconds
        of its computation."""
        host = self._host_seconds(len(self.traffic.forward))
        return self.overlap(busy + host, self.forward_message(costs))

    def backward(self, busy: float, costs: ParameterCosts, *, gathers: bool = True) -> float:
        """Return the seconds of a block's backward pass beside its messages."""
        [seconds] = self.backward_passes([busy], costs, gathers=gathers)
        return seconds

    def backward_passes(
        self, busy: Sequence[float], costs: ParameterCosts, *, gathers: bool = True
    ) -> list[float]:
        """Return `backward` for several passes with the same messages."""
        host = self._host_seconds(len(self._select_backward(gathers=gathers)))
        message = self.backward_message(costs, gathers=gathers)
        return [self.overlap(seconds + host, message) for seconds in busy]

    def _host_seconds(self, messages: int) -> float:
        """Return the engine's overhead on the host in a block's pass, in seconds."""
        traffic = self.traffic
        return self.machine.host(traffic.pass_launches + traffic.message_launches * messages)

    def recompute_seconds(self, rule: Rule) -> float:
        """Return the engine's overhead in a block's second forward pass, in seconds."""
        launches = self.traffic.recompute_launches
        return 0.0 if rule == "none" else self.machine.host(launches)

    @property
    def _copied_bytes(self) -> Mapping[Message, int]:
        """Bytes of memory traffic per element on one rank, where messages are copies: masters are
        rounded into a buffer, which becomes weights; gradients are widened into one, and summed."""
        weight = self.widths["gather"]
        return {
            "gather": MASTER_BYTES + 3 * weight,
            "reduce": weight + 3 * GRADIENT_BYTES,
        }

    def overlap(self, busy: float, message: float) -> float:
        """Return the seconds of a pass and a concurrent message; copies on one rank take memory's
        time from the pass."""
        if self.data_ranks == 1:
            return busy + message
        return self.machine.overlapped(busy, message, self.stride * self.shard_ranks)

    def update(self, forward: float, backward: float, costs: ParameterCosts) -> float:
        """Return the seconds of the optimizer step, of messages beside it, and of those beside a
        step's first forward or last backward pass, as far as these do not hide them."""
        traffic, weight_bytes = self.traffic, self.widths["gather"]
        seconds = price_optimizer(self.machine, traffic, costs.updated, weight_bytes)
        num_messages = len(traffic.first_forward) + len(traffic.last_backward)
        if num_messages:
            seconds += self.machine.host(traffic.message_launches * num_messages)
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
