"""Execute a schedule: run the passes of this rank's stage over a step's micro-batches.

    forward     receive the stream ─► chunk ─► send the stream to the next chunk
    backward    loss / divisor + attach_gradients(stream, received) ─► engine ─► send gradients

The first chunk receives no stream, and the last chunk sends none: on one stage nothing is sent.
Every stage reads the rows itself, so tokens, weights and documents are never sent; the messages'
shapes and dtypes follow from them, so no metadata is sent either. Tensors are sent one by one, and
never copied: the sender keeps each until it has arrived (layout/messages.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...models.documents import Documents
from ...models.parallel.handed import attach_gradients
from ..engines.engine import Engine
from ..engines.objective import Sums
from ..layout.groups import Parallel
from ..layout.messages import messages_by_action
from ..layout.schedules import Orders, StageAction
from .batches import MicroBatch

Stream = tuple[torch.Tensor, ...]


def execute(
    orders: Orders,
    batches: Sequence[MicroBatch],
    engine: Engine,
    parallel: Parallel,
    divisor: float = 1.0,
    token_losses: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Run the actions of this rank's stage. Return Σ w·ℓ by row, [rows] for each micro-batch; zeros
    on stages that compute no loss.

    Backward passes start from the loss divided by `divisor`. `token_losses` receives `Sums.tokens`
    of the micro-batches, on the stage that computes the loss.
    """
    execution = _StepExecution(orders, batches, engine, parallel, token_losses is not None)
    losses = execution.run(divisor)
    if token_losses is not None:
        token_losses += [execution.token_losses[micro] for micro in sorted(execution.token_losses)]
    return losses


def forward_pass(
    engine: Engine, batch: MicroBatch, parallel: Parallel, chunk: int = 0, stream: Stream = ()
) -> Sums:
    """Run a chunk of the objective on this rank's shard of a micro-batch."""
    device, context = parallel.device, parallel.axes.context
    tokens, targets, weights = (
        tensor.to(device, non_blocking=True)
        for tensor in (batch.tokens, batch.targets, batch.weights)
    )
    global_shape = (tokens.shape[0], tokens.shape[1] * context.size)
    documents = Documents.build(batch.cu_seqlens, global_shape)
    # On the CPU, single-document rows and packed rows add in different orders.
    if device.type == "cuda" and not documents.packed:
        return engine(tokens, targets, weights, None, chunk, stream)
    on_device = documents.shard(context).to(device)
    return engine(tokens, targets, weights, on_device, chunk, stream)


class _StepExecution:
    def __init__(
        self,
        orders: Orders,
        batches: Sequence[MicroBatch],
        engine: Engine,
        parallel: Parallel,
        keeps_tokens: bool,
    ) -> None:
        self.actions = orders[parallel.pipe.stage]
        self.batches = batches
        self.engine = engine
        self.parallel = parallel
        self.last_chunk = parallel.pipe.last_chunk
        self.in_flight: dict[tuple[int, int], tuple[Stream, Sums]] = {}
        """Inputs and outputs of passes without a backward pass so far, by (chunk, micro-batch)."""
        self.losses = [torch.zeros(len(batch.tokens), device=parallel.device) for batch in batches]
        self.keeps_tokens = keeps_tokens
        self.token_losses: dict[int, torch.Tensor] = {}
        """Losses by token, by micro-batch, if they are kept."""
        self.messages = messages_by_action(orders, parallel.pipe.stage)
        self.received: dict[StageAction, Stream] = {}
        """Received messages, by the action that needs them."""
        self.sent: dict[StageAction, list[tuple[dist.Work, torch.Tensor]]] = {}
        """Messages on their way, which must live until they have arrived."""

    def run(self, divisor: float) -> list[torch.Tensor]:
        backwards = [action for action in self.actions if action.kind == "backward"]
        for action in self.actions:
            if action.kind == "forward":
                self.forward(action)
            else:
                self.backward(action, divisor, last=action == backwards[-1])
        for action in list(self.sent):
            self.end_send(action)
        return self.losses

    def forward(self, action: StageAction) -> None:
        chunk, micro = action.chunk, action.micro
        stream: Stream = ()
        if chunk > 0:
            stream = self.receive(action)
            for tensor in stream:
                tensor.requires_grad_(torch.is_grad_enabled())
        sums = forward_pass(self.engine, self.batches[micro], self.parallel, chunk, stream)
        if chunk == self.last_chunk:
            self.losses[micro] = sums.rows
            if self.keeps_tokens and sums.tokens is not None:
                self.token_losses[micro] = sums.tokens
        else:
            self.send(action, sums.stream)
        if torch.is_grad_enabled():
            self.in_flight[chunk, micro] = stream, sums

    def backward(self, action: StageAction, divisor: float, *, last: bool) -> None:
        stream, sums = self.in_flight.pop((action.chunk, action.micro))
        loss = sums.total / divisor
        if action.chunk < self.last_chunk:
            loss = loss + attach_gradients(sums.stream, self.receive(action))
        del sums  # the graph keeps what the backward pass needs
        self.engine.backward(loss, last=last)
        if stream:
            self.send(action, [_gradient(tensor) for tensor in stream])

    def send(self, action: StageAction, stream: Sequence[torch.Tensor]) -> None:
        wire = self.parallel.pipe.sends[action.kind]
        self.sent[action] = []
        for tensor in stream:
            message = tensor.detach().contiguous()
            assert message.dtype == self.engine.dtype, "the receiver expects the compute precision"
            work = dist.isend(message, wire.peer, group=wire.group)
            assert work is not None
            self.sent[action].append((work, message))

    def end_send(self, action: StageAction) -> None:
        """Wait until an action's messages have arrived, and free them."""
        for work, _ in self.sent.pop(action):
            work.wait()

    def receive(self, action: StageAction) -> Stream:
        """Receive the chunk's input stream, or the gradients of its output stream."""
        messages, wire = self.messages[action], self.parallel.pipe.receives[action.kind]
        for receiver in messages.received:
            stream = self.allocate_message(receiver)
            for tensor in stream:
                dist.recv(tensor, wire.peer, group=wire.group)
            self.received[receiver] = stream
        for earlier in messages.arrived:
            self.end_send(earlier)
        return self.received.pop(action)

    def allocate_message(self, action: StageAction) -> Stream:
        """Allocate the tensors that an action receives, [rows, length / tp, width]."""
        model = self.engine.objective.model
        rows, length = self.batches[action.micro].tokens.shape
        shape = rows, length // self.parallel.axes.tensor.size, model.config.width
        chunk = action.chunk if action.kind == "forward" else action.chunk + 1
        return tuple(
            torch.empty(shape, dtype=self.engine.dtype, device=self.parallel.device)
            for _ in range(model.stream_tensors(chunk))
        )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
