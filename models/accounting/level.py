"""Memory level of a rank by part during a step, and the events that its engine receives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config.options.names import LinearForm
from .state import HOST, Degrees, Shards, StatePart

Unit = int | None
"""Layer number, or None for embedding, final norm, head and shared blocks."""
ACTIVATIONS = "activations"
WORKING = "working set"
LOGITS = "logits"
"""Activations and working set of final norm, logits and loss."""
GRADIENTS = "gradients"
INPUTS = "inputs"


@dataclass(frozen=True)
class Moment:
    """A stretch of a step: a pass of a layer, or an update."""

    name: str
    """Such as `forward 3 attention`."""
    layer: Unit
    micro: int
    high: Mapping[str, int]
    """Bytes by part at the moment's peak."""
    end: Mapping[str, int]
    """Bytes by part at its end."""


@dataclass
class Level:
    """A rank's current bytes by part, and the finished moments. The total excludes host memory."""

    parts: dict[str, int] = field(default_factory=dict)
    total: int = 0
    moments: list[Moment] = field(default_factory=list)
    _peak: int = -1
    _peak_parts: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, size: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + size
        if part.startswith(HOST):
            return
        self.total += size
        if size > 0 and self.total > self._peak:
            self._peak, self._peak_parts = self.total, dict(self.parts)

    def add_transient(self, part: str, size: int) -> None:
        """Allocate bytes and free them at once."""
        self.add(part, size)
        self.add(part, -size)

    def end_moment(self, name: str, layer: Unit, micro: int) -> None:
        """Finish a moment, with its peak and its end."""
        peak_parts = self._peak_parts if self._peak >= self.total else self.parts
        self.moments.append(Moment(name, layer, micro, dict(peak_parts), dict(self.parts)))
        self._peak, self._peak_parts = self.total, dict(self.parts)


LOSS = "loss"


class EngineMemory(ABC):
    """Memory of an engine during a step, in addition to activations."""

    @abstractmethod
    def begin(self, level: Level) -> None:
        """Add the state that survives a step."""

    @abstractmethod
    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        """A layer, or the root, begins a pass."""

    @abstractmethod
    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        """A layer, or the root, ends a pass."""

    @abstractmethod
    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        """A parameter's gradient is complete: `size` bytes, not yet counted. `last` is True in the
        last micro-batch of a step."""

    @abstractmethod
    def end_backward(self, level: Level, *, last: bool) -> None:
        """A backward pass has ended."""

    @abstractmethod
    def update(self, level: Level) -> None:
        """The optimizer runs."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """State of an engine, with the name to print."""

    engine: str
    device: str
    """Device type: cuda or cpu."""
    parts: Sequence[StatePart]
    linear: LinearForm = "torch"
    """The engine's linear function."""
    memory: Callable[[Shards, Degrees], EngineMemory]
    """Creates the engine's events for a rank with these shards."""
