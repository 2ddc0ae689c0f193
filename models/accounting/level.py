"""A rank's memory by category during a step, and the events that its engine receives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.options.names import LinearForm
from .state import HOST, Degrees, Shards, StatePart, device_bytes

Unit = int | None
"""Layer number, or None for embedding, final norm, head and shared blocks."""
ACTIVATIONS = "activations"
WORKING = "working set"
LOGITS = "logits"
"""Final norm, logits and loss: activations and working set."""
GRADIENTS = "gradients"
INPUTS = "inputs"


@dataclass(frozen=True)
class Moment:
    """A stretch of a step: a layer's pass, or an update."""

    name: str
    """Such as `forward 3 attention`."""
    layer: Unit
    micro: int
    high: Mapping[str, int]
    """Bytes by category at the moment's peak."""
    end: Mapping[str, int]
    """Bytes by category at its end."""


@dataclass
class Level:
    """A rank's current bytes by category, and the finished moments. The total excludes host
    memory."""

    bytes_by_category: dict[str, int] = field(default_factory=dict)
    total: int = 0
    moments: list[Moment] = field(default_factory=list)
    _peak: int = -1
    _peak_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, category: str, size: int) -> None:
        self.bytes_by_category[category] = self.bytes_by_category.get(category, 0) + size
        if category.startswith(HOST):
            return
        self.total += size
        if size > 0 and self.total > self._peak:
            self._peak, self._peak_bytes = self.total, dict(self.bytes_by_category)

    def add_transient(self, category: str, size: int) -> None:
        """Allocate bytes and free them at once."""
        self.add(category, size)
        self.add(category, -size)

    def end_moment(self, name: str, layer: Unit, micro: int) -> None:
        """Finish a moment, with its peak and its end."""
        peak_bytes = self._peak_bytes if self._peak >= self.total else self.bytes_by_category
        self.moments.append(
            Moment(name, layer, micro, dict(peak_bytes), dict(self.bytes_by_category))
        )
        self._peak, self._peak_bytes = self.total, dict(self.bytes_by_category)

    def unfinished_peak(self) -> Sequence[tuple[str, int]]:
        """Return the peak since the last moment as bytes beyond the current ones, by category."""
        peak_bytes = self._peak_bytes
        return tuple(
            (category, excess)
            for category, size in self.bytes_by_category.items()
            if (excess := peak_bytes.get(category, 0) - size)
        )

    def shift(
        self, sizes: Mapping[str, int], device: int, unfinished_peak: Sequence[tuple[str, int]]
    ) -> None:
        """Add the bytes that passes without new moments leave, `device` in total on the device, and
        their unfinished peak."""
        for category, size in sizes.items():
            self.bytes_by_category[category] += size
        self.total += device
        self._peak, self._peak_bytes = self.total, dict(self.bytes_by_category)
        for category, excess in unfinished_peak:
            self._peak_bytes[category] += excess
        self._peak += device_bytes(dict(unfinished_peak))


LOSS = "loss"


class EngineMemory(ABC):
    """An engine's memory during a step, in addition to activations."""

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
        """A parameter's gradient is complete: `size` bytes, not yet counted. `last` is True in a
        step's last micro-batch."""

    @abstractmethod
    def end_backward(self, level: Level, *, last: bool) -> None:
        """A backward pass has ended."""

    @abstractmethod
    def update(self, level: Level) -> None:
        """The optimizer runs."""

    def save(self) -> Hashable | None:
        """Return all that events have changed and later ones depend on: equal passes from equal
        states add equal bytes, and are counted once. None: all passes are counted."""
        return None

    def restore(self, saved: Any) -> None:  # noqa: B027
        """Return to a saved state."""


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """Engine state, with the name to print."""

    engine: str
    device: str
    """Device type: cuda or cpu."""
    state_parts: Sequence[StatePart]
    linear: LinearForm = "torch"
    """The engine's linear function."""
    memory: Callable[[Shards, Degrees], EngineMemory]
    """Creates the engine's events for a rank with these shards."""
