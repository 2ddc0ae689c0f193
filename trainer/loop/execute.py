"""Executor of a schedule: run the passes of this rank's stage over the micro-batches of a step.

    forward     receive the stream ─► chunk ─► send the stream to the next chunk
    backward    loss / divisor + handed(stream, received gradients) ─► engine ─► send gradients

The first chunk receives no stream, the last chunk sends none: on one stage nothing is sent. Every
stage reads its own rows, so tokens, weights and documents never travel; shapes and dtypes of the
messages follow from them, so no metadata travels either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ...models.documents import Documents
from ...models.parallel.handed import handed
from ..engines.engine import Engine
from ..engines.objective import Sums
from ..layout.groups import Parallel, Wire
from ..pipeline.schedules import Action, Kind, Orders
from .batches import MicroBatch

Key = tuple[int, int]
"""Chunk that takes a message, and micro-batch."""
Stream = tuple[torch.Tensor, ...]


def execute(
    orders: Orders,
    batches: Sequence[MicroBatch],
    engine: Engine,
    parallel: Parallel,
    divisor: float = 1.0,
    before_last: Callable[[list[torch.Tensor]], float] | None = None,
) -> list[torch.Tensor]:
    """Run the actions of this rank's stage. Return the losses by row, Σ w·ℓ, of each micro-batch;
    zeros on stages that compute no loss.

    Backward passes start from the loss divided by `divisor`. Before the last backward pass from
    the loss, `before_last` receives the losses by row and returns the divisor of that pass.
    """
    return _Step(orders, batches, engine, parallel).run(divisor, before_last)


def forward_pass(
    engine: Engine, batch: MicroBatch, parallel: Parallel, chunk: int = 0, stream: Stream = ()
) -> Sums:
    """Run a chunk of the objective on this rank's part of a micro-batch."""
    device, context = parallel.device, parallel.axes.context
    tokens, targets, weights = (
        tensor.to(device, non_blocking=True)
        for tensor in (batch.tokens, batch.targets, batch.weights)
    )
    whole = (tokens.shape[0], tokens.shape[1] * context.size)
    documents = Documents.from_cu_seqlens(batch.cu_seqlens, whole)
    # On the CPU, rows of one document and packed rows add in another order.
    if device.type == "cuda" and not documents.packed:
        return engine(tokens, targets, weights, None, chunk, stream)
    on_device = documents.part(context).to(device)
    return engine(tokens, targets, weights, on_device, chunk, stream)


class _Step:
    def __init__(
        self,
        orders: Orders,
        batches: Sequence[MicroBatch],
        engine: Engine,
        parallel: Parallel,
    ) -> None:
        self.actions = orders[parallel.pipe.stage]
        self.batches = batches
        self.engine = engine
        self.parallel = parallel
        self.last_chunk = parallel.pipe.last_chunk
        self.alive: dict[Key, tuple[Stream, Sums]] = {}
        """Inputs and outputs of the chunks whose backward pass is still to come."""
        self.losses = [torch.zeros(len(batch.tokens), device=parallel.device) for batch in batches]
        self.inboxes = {
            kind: _Inbox(wire, _due(kind, orders[wire.stage], self.last_chunk))
            for kind, wire in parallel.pipe.receives.items()
        }
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []

    def run(
        self, divisor: float, before_last: Callable[[list[torch.Tensor]], float] | None
    ) -> list[torch.Tensor]:
        backwards = [action for action in self.actions if action.kind == "backward"]
        decides = [action for action in backwards if action.chunk == self.last_chunk][-1:]
        for action in self.actions:
            if action.kind == "forward":
                self.forward(action)
                continue
            if before_last is not None and action in decides:
                divisor = before_last(self.losses)
            self.backward(action, divisor, last=action == backwards[-1])
        for work, _ in self.sent:
            work.wait()
        return self.losses

    def forward(self, action: Action) -> None:
        chunk, micro = action.chunk, action.micro
        stream: Stream = ()
        if chunk > 0:
            stream = self.receive("forward", action)
            for tensor in stream:
                tensor.requires_grad_(torch.is_grad_enabled())
        sums = forward_pass(self.engine, self.batches[micro], self.parallel, chunk, stream)
        if chunk == self.last_chunk:
            self.losses[micro] = sums.rows
        else:
            self.send("forward", sums.stream)
        if torch.is_grad_enabled():
            self.alive[chunk, micro] = stream, sums

    def backward(self, action: Action, divisor: float, *, last: bool) -> None:
        stream, sums = self.alive.pop((action.chunk, action.micro))
        loss = sums.total / divisor
        if action.chunk < self.last_chunk:
            loss = loss + handed(sums.stream, self.receive("backward", action))
        self.engine.backward(loss, last=last)
        if stream:
            self.send("backward", [_gradient(tensor) for tensor in stream])

    def send(self, kind: Kind, stream: Sequence[torch.Tensor]) -> None:
        wire = self.parallel.pipe.sends[kind]
        message = torch.stack([tensor.detach() for tensor in stream])
        assert message.dtype == self.engine.dtype, "the receiver expects the compute precision"
        work = dist.isend(message, wire.peer, group=wire.group)
        assert work is not None
        self.sent = [pair for pair in self.sent if not pair[0].is_completed()]
        self.sent.append((work, message))  # the message lives until it is sent

    def receive(self, kind: Kind, action: Action) -> Stream:
        """Return the stream that enters the chunk, or the gradients of the stream that leaves."""
        model = self.engine.objective.model
        rows, length = self.batches[action.micro].tokens.shape
        part = length // self.parallel.axes.tensor.size

        def empty(key: Key) -> torch.Tensor:
            entered = key[0] if kind == "forward" else key[0] + 1
            shape = (model.stream_tensors(entered), rows, part, model.config.width)
            return torch.empty(shape, dtype=self.engine.dtype, device=self.parallel.device)

        return self.inboxes[kind].take((action.chunk, action.micro), empty).unbind()


class _Inbox:
    """Messages of one wire. They arrive in the order of the sender's actions; a message that is
    wanted later is kept."""

    def __init__(self, wire: Wire, due: Iterator[Key]) -> None:
        self.wire = wire
        self.due = due
        self.early: dict[Key, torch.Tensor] = {}

    def take(self, wanted: Key, empty: Callable[[Key], torch.Tensor]) -> torch.Tensor:
        while wanted not in self.early:
            key = next(self.due)
            self.early[key] = empty(key)
            dist.recv(self.early[key], self.wire.peer, group=self.wire.group)
        return self.early.pop(wanted)


def _due(kind: Kind, order: Sequence[Action], last_chunk: int) -> Iterator[Key]:
    """Yield the chunk and micro-batch that each message of a stage is for, in order."""
    hop = 1 if kind == "forward" else -1
    for action in order:
        target = action.chunk + hop
        if action.kind == kind and 0 <= target <= last_chunk:
            yield target, action.micro


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
