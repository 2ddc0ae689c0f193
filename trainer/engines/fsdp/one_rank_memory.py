"""Model the memory of a rank that holds the whole state alone, for the memory accounting.

always              fp32 masters, optimizer; in half precision also the weights
backward            fp32: gradients, which stay to the update
                    half precision: gradients wait until they are many, or the pass ends;
                    then they are added to fp32 sums, which stay to the update
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ....models.accounting.level import GRADIENTS, EngineMemory, Level, Unit
from ....models.accounting.state import Degrees, Shards, state_bytes

if TYPE_CHECKING:
    from ..config import StateOnDevice

SUM_BYTES = 4
"""Bytes of a number in a summed gradient: fp32."""
MAX_PENDING = 1 << 26
"""Elements of gradients that wait to be added: a few launches add them all, and they take little
memory."""
CHUNK = 1 << 24
"""Elements whose squares are summed at once (layer_norms.py)."""


class OneRankMemory(EngineMemory):
    def __init__(self, state: StateOnDevice, shards: Shards, degrees: Degrees) -> None:
        self.fp32, self.half = state.fp32, state.precision.separate_masters
        self.promotes = state.device == "cpu"
        """True if an addition of two dtypes converts the whole operand first."""
        persistent = [part for part in state.parts if part.name != GRADIENTS]
        self.persistent = state_bytes(persistent, shards, degrees)
        self.numels = {name: math.prod(shard.local) for name, shard in shards.items()}
        self.pending: dict[str, int] = {}
        """Bytes of waiting gradients, by parameter."""
        self.summed: set[str] = set()
        """Parameters that have a gradient."""

    def begin(self, level: Level) -> None:
        for part, size in self.persistent.items():
            level.add(part, size)

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        pass

    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        pass

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        if self.half and name not in self.fp32:
            level.add(GRADIENTS, size)
            self.pending[name] = size
            if sum(self.numels[pending] for pending in self.pending) > MAX_PENDING:
                self._add_pending(level)
        elif name in self.summed:
            level.add_transient(GRADIENTS, size)
        else:
            self.summed.add(name)
            level.add(GRADIENTS, size)

    def end_backward(self, level: Level, *, last: bool) -> None:
        self._add_pending(level)

    def save(self) -> Hashable:
        return tuple(self.pending.items()), frozenset(self.summed)

    def restore(self, saved: Any) -> None:
        pending, summed = saved
        self.pending, self.summed = dict(pending), set(summed)

    def update(self, level: Level) -> None:
        largest = max(self.numels.values(), default=0)
        level.add_transient("working", 8 * min(largest, CHUNK))

    def _add_pending(self, level: Level) -> None:
        """Add the waiting gradients to their sums."""
        new = self.pending.keys() - self.summed
        level.add(GRADIENTS, SUM_BYTES * sum(self.numels[name] for name in new))
        if self.promotes:
            later = (self.numels[name] for name in self.pending.keys() - new)
            level.add_transient(GRADIENTS, SUM_BYTES * max(later, default=0))
        level.add(GRADIENTS, -sum(self.pending.values()))
        self.summed |= new
        self.pending.clear()
