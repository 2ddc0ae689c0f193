"""A rank's memory over a training step, from the layers' passes and the engine's events.

    forward    layer by layer: the working set comes and goes, activations stay
    backward   in reverse; every complete gradient goes to the engine
    update     the optimizer

The engine adds its own memory (`EngineMemory`): gathered weights while a layer runs, buffers,
gradients. The timeline's peak is the rank's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
from .pieces import EMBEDDINGS, ModelPasses, Passes, PassSegment
from .shape import Shape
from .state import device_bytes


@dataclass(frozen=True)
class Stretch:
    """Moments of a pass, as they were counted once, and where they stand in the step."""

    counted: Sequence[Moment]
    highest: int
    """Highest device bytes among the counted moments."""
    micro: int
    added: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category that the step has beyond the counted moments."""
    added_device: int = 0

    @cached_property
    def moments(self) -> Sequence[Moment]:
        return [self._place(moment) for moment in self.counted] if self.added else self.counted

    @property
    def peak(self) -> Moment:
        """The first moment with the highest device memory."""
        sizes = (device_bytes(moment.high) for moment in self.counted)
        moment = self.counted[next(i for i, size in enumerate(sizes) if size == self.highest)]
        return self._place(moment) if self.added else moment

    def _place(self, moment: Moment) -> Moment:
        high, end = (
            {category: sizes.get(category, 0) + size for category, size in self.added.items()}
            for sizes in (moment.high, moment.end)
        )
        return Moment(moment.name, moment.layer, self.micro, high, end)


@dataclass(frozen=True)
class Timeline:
    """A rank's memory over a step."""

    stretches: Sequence[Stretch]

    @cached_property
    def moments(self) -> Sequence[Moment]:
        return [moment for stretch in self.stretches for moment in stretch.moments]

    @cached_property
    def peak(self) -> Moment:
        """The moment with the highest device memory."""
        return max(self.stretches, key=lambda s: s.highest + s.added_device).peak

    @cached_property
    def highest(self) -> int:
        """Device bytes at the peak."""
        return device_bytes(self.peak.high)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return {name: size for name, size in self.peak.high.items() if size}


def input_bytes(shape: Shape) -> int:
    """Count a micro-batch's bytes: token ids, targets, weights and documents."""
    tokens = shape.rows * shape.seq_len // shape.degrees.cp
    row_tokens = shape.rows * shape.seq_len
    return tokens * (8 + 4) + (0 if shape.device == "cuda" else 3 * 8 * row_tokens)


class Action(NamedTuple):
    """A micro-batch's pass through a chunk, and the messages before it."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro: int
    received: tuple[int, ...] = ()
    """Chunks whose output stream (forward) or upstream gradient (backward) is received first."""
    arrived: tuple[int, ...] = ()
    """Chunks whose gradients, from earlier backward passes, have reached their stage by then."""


def stream_bytes(shape: Shape, width: int) -> int:
    """Count a micro-batch's stream tensor in bytes on a rank."""
    degrees = shape.degrees
    tokens = shape.rows * shape.seq_len // degrees.cp // degrees.tp
    return tokens * width * shape.precision.weight_bytes


class ChunkPart(NamedTuple):
    """A layer, the embedding or the loss, with its passes."""

    name: str
    unit: Unit
    passes: Passes


def cut_passes(passes: ModelPasses, chunks: Sequence[range]) -> list[list[ChunkPart]]:
    """Return every chunk's parts in forward order; `chunks` are layer ranges."""
    chunk_parts = [
        [ChunkPart(passes.names[n], n, passes.layers[n]) for n in layers] for layers in chunks
    ]
    chunk_parts[0].insert(0, ChunkPart("embedding", None, passes.first))
    chunk_parts[-1].append(ChunkPart(LOSS, None, passes.last))
    return chunk_parts


def timeline(
    chunks: Sequence[Sequence[ChunkPart]],
    engine: EngineMemory,
    actions: Iterable[Action],
    inputs: int = 0,
    stream: int = 0,
) -> Timeline:
    """Simulate a rank's memory while it runs a step's actions. `chunks` are all the model's chunks,
    `inputs` a step's tokens in bytes, and `stream` the bytes per tensor sent between stages."""
    return _StepSimulation(chunks, engine, stream).run(list(actions), inputs)


class _StepSimulation:
    def __init__(
        self, chunks: Sequence[Sequence[ChunkPart]], engine: EngineMemory, stream: int
    ) -> None:
        self.chunks, self.engine, self.stream = chunks, engine, stream
        calls = [
            any(
                segment.gradient == EMBEDDINGS
                for chunk_part in chunk
                for segment in chunk_part.passes.backward
            )
            for chunk in chunks
        ]
        self.num_tensors = [1 + any(calls[chunk:]) for chunk in range(len(chunks))]
        """Tensors in each chunk's input stream: later calls also need the embeddings."""
        self.sent_bytes = 0
        """Gradient bytes in flight to other stages."""
        self.level = Level()
        self.pending: Counter[str] = Counter()
        """Contributions to each parameter's gradient that this backward pass still has to add."""
        self.partial_gradients: dict[str, int] = {}
        """Bytes of incomplete gradients."""

    def run(self, actions: Sequence[Action], inputs: int) -> Timeline:
        level, engine = self.level, self.engine
        engine.begin(level)
        level.add(INPUTS, inputs)
        level.end_moment("state", None, 0)
        backwards = (action for action in reversed(actions) if action.kind == "backward")
        last_backward = next(backwards, None)
        stretches, passes = [self._cut_stretch()], _Passes(self)
        for action in actions:
            stretches.append(passes.run(action, last=action is last_backward))
        passes.restore_engine()
        self._drop_sent(self.sent_bytes)
        engine.update(level)
        level.end_moment("update", None, 0)
        return Timeline([*stretches, self._cut_stretch()])

    def run_pass(self, action: Action, *, last: bool) -> Stretch:
        """Count a pass of a micro-batch through a chunk."""
        if action.kind == "forward":
            self._forward(action)
        else:
            self._backward(action, last=last)
        return self._cut_stretch(action.micro)

    def _cut_stretch(self, micro: int = 0) -> Stretch:
        moments, self.level.moments = self.level.moments, []
        return Stretch(moments, max(device_bytes(moment.high) for moment in moments), micro)

    def _input_stream_bytes(self, chunk: int) -> int:
        """Count a chunk's input stream in bytes. Inside a stage, streams belong to the passes."""
        return self.stream * self.num_tensors[chunk] if 0 < chunk < len(self.chunks) else 0

    def _receive(self, action: Action) -> None:
        is_backward = action.kind == "backward"
        self._add_stream(
            sum(self._input_stream_bytes(chunk + is_backward) for chunk in action.received)
        )
        self._drop_sent(sum(self._input_stream_bytes(chunk) for chunk in action.arrived))

    def _add_stream(self, size: int) -> None:
        """Add stream bytes; without stages there are none."""
        if size:
            self.level.add(ACTIVATIONS, size)

    def _drop_sent(self, size: int) -> None:
        """Free gradients that have reached another stage."""
        self._add_stream(-size)
        self.sent_bytes -= size

    def _forward(self, action: Action) -> None:
        level, engine, (_, chunk, micro, *_) = self.level, self.engine, action
        self._receive(action)
        engine.enter(level, None, backward=False)
        for name, unit, passes in self.chunks[chunk]:
            if unit is not None:
                engine.enter(level, unit, backward=False)
            for segment in passes.forward:
                self._run_segment(name, segment)
            if unit is not None:
                engine.leave(level, unit, backward=False)
            level.end_moment(f"forward {name}", unit, micro)
        engine.leave(level, None, backward=False)
        self._add_stream(
            max(0, self._input_stream_bytes(chunk + 1) - self.stream)
        )  # a copy of the embeddings

    def _backward(self, action: Action, *, last: bool) -> None:
        level, engine, (_, chunk, micro, *_) = self.level, self.engine, action
        chunk_parts = self.chunks[chunk]
        self._receive(action)
        output_stream, input_stream = (
            self._input_stream_bytes(chunk + 1),
            self._input_stream_bytes(chunk),
        )
        self._add_stream(-output_stream)  # its gradient has come instead
        if output_stream > self.stream:
            self.partial_gradients[EMBEDDINGS] = self.stream
        self.pending = Counter(
            segment.gradient
            for *_, passes in chunk_parts
            for segment in passes.backward
            if segment.gradient
        )
        engine.enter(level, None, backward=True)
        for name, unit, passes in reversed(chunk_parts):
            if unit is not None:
                engine.enter(level, unit, backward=True)
            for segment in passes.backward:
                self._run_segment(name, segment)
                if segment.gradient:
                    self._complete_gradient(segment.gradient, segment.size, last=last)
            if unit is not None:
                engine.leave(level, unit, backward=True)
            level.end_moment(f"backward {name}", unit, micro)
        self._add_stream(input_stream)  # until the pass ends, beside its gradient
        self._add_stream(-input_stream)
        level.add(ACTIVATIONS, -self.partial_gradients.pop(EMBEDDINGS, 0))
        self.sent_bytes += input_stream
        engine.leave(level, None, backward=True)
        engine.end_backward(level, last=last)
        level.end_moment("backward end", None, micro)

    def _run_segment(self, name: str, segment: PassSegment) -> None:
        loss = name == LOSS
        self.level.add_transient(LOGITS if loss else WORKING, segment.high)
        self.level.add(LOGITS if loss else ACTIVATIONS, segment.change)

    def _complete_gradient(self, name: str, size: int, *, last: bool) -> None:
        """Pass a gradient to the engine once all contributions are added."""
        self.pending[name] -= 1
        category = ACTIVATIONS if name == EMBEDDINGS else GRADIENTS
        if self.pending[name] or name == EMBEDDINGS:
            if name not in self.partial_gradients:
                self.partial_gradients[name] = size
                self.level.add(category, size)
            return
        self.level.add(category, -self.partial_gradients.pop(name, 0))
        self.engine.gradient(self.level, name, size, last=last)


class _State(NamedTuple):
    """All that a pass depends on, beside its action."""

    engine: Hashable
    """None for an engine that cannot be restored."""
    unfinished_peak: Sequence[tuple[str, int]]
    """Bytes by which the next moment begins above the current level."""


class _CountedPass(NamedTuple):
    stretch: Stretch
    start: Mapping[str, int]
    """Bytes by category at its start."""
    start_device: int
    change: Mapping[str, int]
    """Bytes that it adds by category, from its start to its end."""
    change_device: int
    sent_change: int
    """Bytes that it adds to the gradients in flight to other stages."""
    end_state: int


class _Passes:
    """Counts each pass once: an equal action from an equal state adds the same bytes to any level.

    A step has few states: which weights are gathered, which gradients have begun. So most
    micro-batches repeat an earlier one, and the engine stands still until a new pass begins.
    """

    def __init__(self, simulation: _StepSimulation) -> None:
        self.simulation = simulation
        self.counted: dict[Hashable, _CountedPass] = {}
        self.states: list[_State] = []
        self.numbers: dict[_State, int] = {}
        self.state = self._number_state()
        self.stale = False
        """True if the engine is not in `state`."""

    def _number_state(self) -> int:
        simulation = self.simulation
        state = _State(simulation.engine.save(), simulation.level.unfinished_peak())
        if state not in self.numbers:
            self.numbers[state] = len(self.states)
            self.states.append(state)
        return self.numbers[state]

    def restore_engine(self) -> None:
        if self.stale:
            self.simulation.engine.restore(self.states[self.state].engine)
            self.stale = False

    def run(self, action: Action, *, last: bool) -> Stretch:
        key = action.kind, action.chunk, action.received, action.arrived, last, self.state
        if key in self.counted:
            return self._repeat(self.counted[key], action.micro)
        self.restore_engine()
        simulation, level = self.simulation, self.simulation.level
        start, start_device = dict(level.bytes_by_category), level.total
        sent_bytes = simulation.sent_bytes
        stretch = simulation.run_pass(action, last=last)
        self.state = self._number_state()
        if self.states[self.state].engine is not None:
            sizes = level.bytes_by_category.items()
            self.counted[key] = _CountedPass(
                stretch,
                start,
                start_device,
                change={category: size - start.get(category, 0) for category, size in sizes},
                change_device=level.total - start_device,
                sent_change=simulation.sent_bytes - sent_bytes,
                end_state=self.state,
            )
        return stretch

    def _repeat(self, counted: _CountedPass, micro: int) -> Stretch:
        level, stretch = self.simulation.level, counted.stretch
        added = {
            category: size - counted.start.get(category, 0)
            for category, size in level.bytes_by_category.items()
        }
        added_device = level.total - counted.start_device
        self.state, self.stale = counted.end_state, True
        unfinished_peak = self.states[self.state].unfinished_peak
        level.shift(counted.change, counted.change_device, unfinished_peak)
        self.simulation.sent_bytes += counted.sent_change
        return Stretch(stretch.counted, stretch.highest, micro, added, added_device)
