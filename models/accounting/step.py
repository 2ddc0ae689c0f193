"""Memory of one rank over a training step: the passes of its layers, and the events of its engine.

    forward    part by part: the working set comes and goes, kept results stay
    backward   the same in reverse; each gradient that is complete goes to the engine
    update     the optimizer

An engine says what it holds (`EngineMemory`): whole weights while a layer runs, buffers, gradients.
The highest level of the step is the rank's memory, its parts are the table, its sequence is the
picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .level import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    LOGITS,
    LOSS,
    WORKING,
    EngineMemory,
    Level,
    Moment,
    Unit,
)
from .pieces import EMBEDDINGS, ModelPasses, Passes, Piece
from .shape import Shape
from .state import device_bytes


@dataclass(frozen=True)
class Timeline:
    """Memory of one rank over a step."""

    moments: Sequence[Moment]

    @property
    def peak(self) -> Moment:
        """The moment with the highest level."""
        return max(self.moments, key=lambda moment: device_bytes(moment.high))

    @property
    def highest(self) -> int:
        """Bytes at the highest level."""
        return device_bytes(self.peak.high)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part at the highest level."""
        return {name: size for name, size in self.peak.high.items() if size}


def input_bytes(shape: Shape) -> int:
    """Return the bytes of a micro-batch: token ids, targets, weights, and its documents."""
    tokens = shape.rows * shape.seq_len // shape.degrees.cp
    whole = shape.rows * shape.seq_len
    return tokens * (8 + 4) + (0 if shape.device == "cuda" else 3 * 8 * whole)


class Action(NamedTuple):
    """A pass of a chunk of layers over a micro-batch, and its messages with other stages."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro: int
    received: Sequence[int] = ()
    """Chunks whose messages are received before the pass: streams, or gradients of streams."""
    arrived: Sequence[int] = ()
    """Chunks of earlier backward passes, whose gradients have arrived at another stage by then."""


def stream_bytes(shape: Shape, width: int) -> int:
    """Return the bytes of a tensor of a micro-batch's stream on a rank."""
    degrees = shape.degrees
    tokens = shape.rows * shape.seq_len // degrees.cp // degrees.tp
    return tokens * width * shape.precision.weight_bytes


def timeline(
    passes: ModelPasses,
    engine: EngineMemory,
    actions: Iterable[Action],
    chunks: Sequence[range],
    inputs: int = 0,
    stream: int = 0,
) -> Timeline:
    """Return the memory of a rank that runs these actions in a step. `chunks` are the layers of all
    chunks of the model; `inputs` the bytes of the tokens of a step, `stream` those of a tensor that
    travels between stages."""
    return _Step(passes, engine, chunks, stream).run(list(actions), inputs)


class _Step:
    def __init__(
        self, passes: ModelPasses, engine: EngineMemory, chunks: Sequence[range], stream: int
    ) -> None:
        self.passes, self.engine, self.chunks = passes, engine, chunks
        self.stream = stream
        calls = [any(each.gradient == EMBEDDINGS for each in p.backward) for p in passes.layers]
        self.tensors = [1 + any(calls[layers.start :]) for layers in chunks]
        """Tensors of the stream that enters each chunk: the embeddings travel to later calls."""
        self.sent = 0
        """Bytes of gradients on their way to other stages."""
        self.level = Level()
        self.left: Counter[str] = Counter()
        """Parts of this backward pass that still add to the gradient of a parameter."""
        self.sums: dict[str, int] = {}
        """Bytes of the gradients of which a part is still to come."""

    def run(self, actions: Sequence[Action], inputs: int) -> Timeline:
        level, engine = self.level, self.engine
        engine.begin(level)
        level.add(INPUTS, inputs)
        level.mark("state", None, 0)
        backwards = [action for action in actions if action[0] == "backward"]
        for action in actions:
            if action.kind == "forward":
                self._forward(action)
            else:
                self._backward(action, last=action == backwards[-1])
        self._give_back(self.sent)
        engine.update(level)
        level.mark("update", None, 0)
        return Timeline(level.moments)

    def _parts(self, chunk: int) -> list[tuple[str, Unit, Passes]]:
        """Return the parts of a chunk in the order of the forward pass."""
        passes = self.passes
        parts: list[tuple[str, Unit, Passes]] = [
            (passes.names[number], number, passes.layers[number]) for number in self.chunks[chunk]
        ]
        first: list[tuple[str, Unit, Passes]] = [("embedding", None, passes.first)]
        last: list[tuple[str, Unit, Passes]] = [(LOSS, None, passes.last)]
        return [
            *(first if chunk == 0 else []),
            *parts,
            *(last if chunk == len(self.chunks) - 1 else []),
        ]

    def _enters(self, chunk: int) -> int:
        """Return the bytes of the stream that enters a chunk from another stage, or leaves the
        chunk before it. A stream within a stage belongs to the passes."""
        return self.stream * self.tensors[chunk] if 0 < chunk < len(self.chunks) else 0

    def _receive(self, action: Action) -> None:
        hop = action.kind == "backward"
        self._hold(sum(self._enters(chunk + hop) for chunk in action.received))
        self._give_back(sum(self._enters(chunk) for chunk in action.arrived))

    def _hold(self, size: int) -> None:
        """Add bytes of streams, on a stage among others."""
        if size:
            self.level.add(ACTIVATIONS, size)

    def _give_back(self, arrived: int) -> None:
        """Drop gradients that have arrived at another stage."""
        self._hold(-arrived)
        self.sent -= arrived

    def _forward(self, action: Action) -> None:
        level, engine, (_, chunk, micro, *_) = self.level, self.engine, action
        self._receive(action)
        engine.enter(level, None, backward=False)
        for name, unit, passes in self._parts(chunk):
            if unit is not None:
                engine.enter(level, unit, backward=False)
            for piece in passes.forward:
                self._piece(name, piece)
            if unit is not None:
                engine.leave(level, unit, backward=False)
            level.mark(f"forward {name}", unit, micro)
        engine.leave(level, None, backward=False)
        self._hold(max(0, self._enters(chunk + 1) - self.stream))  # a copy of the embeddings

    def _backward(self, action: Action, *, last: bool) -> None:
        level, engine, (_, chunk, micro, *_) = self.level, self.engine, action
        parts = self._parts(chunk)
        self._receive(action)
        left, entered = self._enters(chunk + 1), self._enters(chunk)
        self._hold(-left)  # its gradient has come instead
        if left > self.stream:
            self.sums[EMBEDDINGS] = self.stream
        self.left = Counter(
            piece.gradient for *_, each in parts for piece in each.backward if piece.gradient
        )
        engine.enter(level, None, backward=True)
        for name, unit, passes in reversed(parts):
            if unit is not None:
                engine.enter(level, unit, backward=True)
            for piece in passes.backward:
                self._piece(name, piece)
                if piece.gradient:
                    self._complete(piece.gradient, piece.size, last=last)
            if unit is not None:
                engine.leave(level, unit, backward=True)
            level.mark(f"backward {name}", unit, micro)
        self._hold(entered)  # until the pass ends, beside its gradient
        self._hold(-entered)
        level.add(ACTIVATIONS, -self.sums.pop(EMBEDDINGS, 0))
        self.sent += entered
        engine.leave(level, None, backward=True)
        engine.end_backward(level, last=last)
        level.mark("backward end", None, micro)

    def _piece(self, name: str, piece: Piece) -> None:
        loss = name == LOSS
        self.level.passing(LOGITS if loss else WORKING, piece.high)
        self.level.add(LOGITS if loss else ACTIVATIONS, piece.change)

    def _complete(self, name: str, size: int, *, last: bool) -> None:
        """Hand a gradient to the engine when all of its parts are there."""
        self.left[name] -= 1
        part = ACTIVATIONS if name == EMBEDDINGS else GRADIENTS
        if self.left[name] or name == EMBEDDINGS:
            if name not in self.sums:
                self.sums[name] = size
                self.level.add(part, size)
            return
        self.level.add(part, -self.sums.pop(name, 0))
        self.engine.gradient(self.level, name, size, last=last)
