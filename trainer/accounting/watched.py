"""Count memory in steps that record norms by layer: they copy the masters during the update."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...models.accounting.level import EngineMemory, Level, Unit
from ...models.accounting.state import HOST, Degrees, Shards, StatePart

COPY = "watched masters"
OPTIMIZER = "optimizer"


class WrappedMemory(EngineMemory):
    """Forwards an engine's memory events; subclasses add to them."""

    def __init__(self, engine: EngineMemory) -> None:
        self.engine = engine

    def begin(self, level: Level) -> None:
        self.engine.begin(level)

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        self.engine.enter(level, unit, backward=backward)

    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        self.engine.leave(level, unit, backward=backward)

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        self.engine.gradient(level, name, size, last=last)

    def end_backward(self, level: Level, *, last: bool) -> None:
        self.engine.end_backward(level, last=last)

    def update(self, level: Level) -> None:
        self.engine.update(level)

    def save(self) -> Hashable | None:
        return self.engine.save()

    def restore(self, saved: Any) -> None:
        self.engine.restore(saved)


class WatchedMemory(WrappedMemory):
    """An engine's memory events, and the copy of the masters (engines/layer_norms.py)."""

    def __init__(self, engine: EngineMemory, copies: dict[str, int]) -> None:
        """`copies` are bytes by part."""
        super().__init__(engine)
        self.copies = copies

    def update(self, level: Level) -> None:
        for part, size in self.copies.items():
            level.add(part, size)
        self.engine.update(level)
        for part, size in self.copies.items():
            level.add(part, -size)


def add_watched_masters(
    memory: Callable[[Shards, Degrees], EngineMemory], parts: Sequence[StatePart]
) -> Callable[[Shards, Degrees], EngineMemory]:
    """Add the copied masters to the memory events of an engine with the state `parts`."""
    return partial(_watched_memory, memory, parts)


def _watched_memory(
    memory: Callable[[Shards, Degrees], EngineMemory],
    parts: Sequence[StatePart],
    shards: Shards,
    degrees: Degrees,
) -> EngineMemory:
    copies: dict[str, int] = {}
    for part in parts:  # masters are sharded like the optimizer's states
        if part.name.removeprefix(HOST) == OPTIMIZER:
            size = replace(part, bytes_per_parameter=4).bytes(shards, degrees)
            if not part.sharded_over:  # replicas take turns
                size = -(-size // degrees.size(("dp", "cp")))
            copy = f"{HOST if part.name.startswith(HOST) else ''}{COPY}"
            copies[copy] = copies.get(copy, 0) + size
    return WatchedMemory(memory(shards, degrees), copies)
