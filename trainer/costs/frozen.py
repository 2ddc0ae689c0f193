"""Memory of frozen parameters, which no engine sees (engines/frozen.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from ...models.accounting.level import EngineMemory, Level, Unit
from ...models.accounting.state import (
    Degrees,
    Shards,
    StatePart,
    by_parameter,
    state_bytes,
)
from ...models.options.precision import Precision

MASTER_BYTES = 4


class FrozenMemory(EngineMemory):
    """Events of an engine, beside frozen parameters."""

    def __init__(
        self, engine: EngineMemory, frozen: Collection[str], sizes: dict[str, int]
    ) -> None:
        """`sizes` are the bytes of the frozen parameters by part."""
        self.engine = engine
        self.frozen = frozen
        self.sizes = sizes

    def begin(self, level: Level) -> None:
        for part, size in self.sizes.items():
            level.add(part, size)
        self.engine.begin(level)

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        self.engine.enter(level, unit, backward=backward)

    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        self.engine.leave(level, unit, backward=backward)

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        if name not in self.frozen:
            self.engine.gradient(level, name, size, last=last)

    def end_backward(self, level: Level, *, last: bool) -> None:
        self.engine.end_backward(level, last=last)

    def update(self, level: Level) -> None:
        self.engine.update(level)


def frozen_parts(
    frozen: frozenset[str], fp32: frozenset[str], precision: Precision
) -> list[StatePart]:
    """Return the parts of frozen parameters: weights, whole on each rank; and, of those that they
    round, a share of the masters. `fp32` are those that are not rounded."""
    if not frozen:
        return []
    rounded = frozen - fp32
    parts = [StatePart(name="weights", bytes_per_parameter=precision.weight_bytes, names=rounded)]
    if precision.separate_masters:
        masters = partial(StatePart, name="masters", bytes_per_parameter=MASTER_BYTES)
        shared = masters(names=rounded, sharded_over=("dp", "cp"), cut=by_parameter)
        parts += [shared, masters(names=frozen & fp32)]
    return parts


def with_frozen(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
) -> Callable[[Shards, Degrees], EngineMemory]:
    """Return the events of an engine that trains the other parameters."""
    return partial(_with_frozen, memory, frozen, parts) if frozen else memory


def _with_frozen(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
    shards: Shards,
    degrees: Degrees,
) -> EngineMemory:
    trained = {name: shard for name, shard in shards.items() if name not in frozen}
    sizes = state_bytes(parts, shards, degrees)
    return FrozenMemory(memory(trained, degrees), frozen, sizes)
