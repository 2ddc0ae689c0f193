"""Bytes of one rank by part, as they change during a step, and the events of its engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config.options.names import LinearForm
from .state import HOST, Degrees, Shards, StatePart

Unit = int | None
"""Number of a layer, or None: embedding, final norm, head and shared blocks."""
ACTIVATIONS = "activations"
WORKING = "working set"
LOGITS = "logits"
"""Activations and working set of the final norm, the logits and the loss."""
GRADIENTS = "gradients"
INPUTS = "inputs"


@dataclass(frozen=True)
class Moment:
    """A part of a step."""

    name: str
    """Such as `forward 3 attention`."""
    layer: Unit
    micro: int
    high: Mapping[str, int]
    """Bytes by part at the highest level."""
    end: Mapping[str, int]
    """Bytes by part at the end."""


@dataclass
class Level:
    """Bytes of one rank by part, and the moments so far. Host memory does not count."""

    parts: dict[str, int] = field(default_factory=dict)
    total: int = 0
    moments: list[Moment] = field(default_factory=list)
    _most: int = -1
    _high: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, size: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + size
        if part.startswith(HOST):
            return
        self.total += size
        if size > 0 and self.total > self._most:
            self._most, self._high = self.total, dict(self.parts)

    def passing(self, part: str, size: int) -> None:
        """Add bytes that are free again at once."""
        self.add(part, size)
        self.add(part, -size)

    def mark(self, name: str, layer: Unit, micro: int) -> None:
        """End a moment."""
        high = self._high if self._most >= self.total else self.parts
        self.moments.append(Moment(name, layer, micro, dict(high), dict(self.parts)))
        self._most, self._high = self.total, dict(self.parts)


LOSS = "loss"


class EngineMemory(ABC):
    """Memory that an engine holds beside the activations, as it changes during a step."""

    @abstractmethod
    def begin(self, level: Level) -> None:
        """Add the bytes that live from step to step."""

    @abstractmethod
    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        """A part begins a pass."""

    @abstractmethod
    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        """A part ends a pass."""

    @abstractmethod
    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        """The gradient of a parameter is complete: `size` bytes that do not count yet. `last` is
        True in the last micro-batch of the step."""

    @abstractmethod
    def end_backward(self, level: Level, *, last: bool) -> None:
        """A backward pass has ended."""

    @abstractmethod
    def update(self, level: Level) -> None:
        """The optimizer runs."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """State of one engine, with the name to print."""

    engine: str
    device: str
    """Kind of device that it runs on: cuda or cpu."""
    parts: Sequence[StatePart]
    linear: LinearForm = "torch"
    """The engine's function of linear layers."""
    memory: Callable[[Shards, Degrees], EngineMemory]
    """Makes the events of the engine in a step, for the rank that has these shards."""
