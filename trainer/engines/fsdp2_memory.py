"""Memory of FSDP2 over a step, for the memory accounting.

    forward of a block    gather: buffer, then whole weights; the buffer waits for the next gather
    after it              whole weights go, if they are sharded again
    backward              gather, and the buffer of the block ahead, the last one's beside the loss;
                          gradients whole
    after it              a copy of the gradients in fp32 is reduced; it waits for the next one,
                          across micro-batches too
    after it, by step     whole gradients stay to the last micro-batch; in bf16 an fp32 sum does
    after it, replicas    HSDP: torch keeps each shard that it sums over replicas until the end of
                          the last backward pass. In the first micro-batch it is the gradient

What belongs to no block (embedding, final norm, head, shared blocks) is whole from the first
forward to the end of the backward pass. On one rank nothing is gathered, and the copies are made.
Split experts are gathered and reduced apart from the rest of their block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ...models.accounting.level import GRADIENTS, EngineMemory, Level, Unit
from ...models.accounting.state import HOST, Degrees, Shapes, Shards, outside_blocks, state_bytes
from .shard_groups import layer_of

if TYPE_CHECKING:
    from ..layout.config import LayoutConfig
    from .config import StateOnDevice

WEIGHTS = "weights"
BUFFERS = "buffers"
REDUCED = 4
"""Bytes of a number of a reduced gradient."""


class Settings(Protocol):
    """Settings of FSDP2 that decide its memory."""

    @property
    def forward_prefetch(self) -> int: ...
    @property
    def backward_prefetch(self) -> int: ...
    @property
    def offloads(self) -> bool: ...
    def gather_of(self, layout: LayoutConfig) -> str: ...
    def resharded(self, layer: int, left: int) -> bool: ...


@dataclass
class _Group:
    """Parameters that are gathered together."""

    whole: int
    """Elements, padded to equal shards."""
    shard: int
    """Elements of the largest shard."""
    ranks: int
    """Ranks that share one copy."""
    replicated: bool = False
    """True if other ranks have copies of the shards."""
    ahead: int = 0
    """Bytes of the buffer of a gather ahead."""
    unsharded: bool = False
    gradients: int = 0
    """Bytes of whole gradients."""
    whole_sums: int = 0
    """Bytes of whole sums in fp32, beside gradients in half precision."""
    reduced: bool = False
    """True if the rank holds the reduced gradient."""
    summed: bool = False
    """True if torch keeps the shard that was summed over replicas, beside the gradient."""


def whole_by_block(shapes: Shapes, ranks: int, *, engine: Settings, ahead: int) -> int:
    """Count the whole weights of a rank that gathers block by block: those of no block, and, at the
    fullest moment of a pass, a run of `ahead` blocks and the kept blocks that ran before it."""
    sizes: dict[int, int] = {}
    for name, shape in shapes.items():
        if (layer := layer_of(name)) is not None:
            sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
    layers = sorted(sizes)
    kept: list[int] = []
    most = 0
    for place, layer in enumerate(layers):
        if not engine.resharded(layer, len(layers) - 1 - place):
            kept.append(layer)
        most = max(most, sum(sizes[each] for each in {*kept, *layers[place : place + ahead]}))
    return outside_blocks(shapes, ranks) + most


class Fsdp2Memory(EngineMemory):
    def __init__(
        self, config: Settings, state: StateOnDevice, shards: Shards, degrees: Degrees
    ) -> None:
        self.config, self.fp32 = config, state.fp32
        self.gather = config.gather_of(state.layout)
        self.half = state.precision.separate_masters
        self.clones = state.device == "cpu"
        """True if a reduce-scatter clones what it sends: gloo does."""
        self.bytes = state.precision.weight_bytes
        self.host = HOST if config.offloads else ""
        self.copies = config.offloads and state.device != "cpu"
        """True if the gradient is a copy of what was reduced, and no view of it."""
        lasting = [
            part
            for part in state.parts
            if (part.sharded_over or part.names == state.fp32) and not part.name.endswith(GRADIENTS)
        ]
        self.lasting = state_bytes(lasting, shards, degrees)
        self.groups: dict[tuple[Unit, bool], _Group] = {(None, False): _Group(0, 0, 1)}
        """By part, and whether its parameters are split experts."""
        self.group_of: dict[str, _Group] = {}
        everywhere = next(part for part in lasting if part.sharded_over)
        by_all = replace(everywhere, shard_ranks=None)
        for name, shard in shards.items():
            if name in self.fp32:
                continue
            ranks = everywhere.ranks(degrees, name, shard)
            all_ranks = by_all.ranks(degrees, name, shard)
            group = self.groups.setdefault((layer_of(name), shard.experts), _Group(0, 0, ranks))
            self.group_of[name] = group
            group.ranks = max(group.ranks, ranks)
            group.replicated |= ranks < all_ranks
            first, *rest = shard.local or (1,)
            own = -(-first // ranks) * math.prod(rest)
            group.shard += own
            group.whole += own * ranks
        self.layers = sorted({unit for unit, _ in self.groups if unit is not None})
        self.gathered = 0
        """Bytes of the buffer of the last gather."""
        self.reducing = 0
        """Bytes of the copy that was reduced last."""
        self.sums: set[str] = set()

    def begin(self, level: Level) -> None:
        for name, size in self.lasting.items():
            level.add(name, size)

    def _of(self, unit: Unit) -> list[_Group]:
        """Return the groups of a part: the rest of a block, and its split experts."""
        return [self.groups[unit, split] for split in (False, True) if (unit, split) in self.groups]

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        for group in self._of(unit):
            self._gather(level, group, backward=backward)
        if self.gather != "block":
            return
        if unit is None:  # torch's own choice, as nothing is set for it: the last block
            near = self.layers[-1:] if backward and self.groups[None, False].whole else []
        elif unit not in self.layers:
            return
        elif backward:
            near = [layer for layer in reversed(self.layers) if layer < unit]
            near = near[: self.config.backward_prefetch]
        else:
            near = [layer for layer in self.layers if layer > unit][: self.config.forward_prefetch]
        for layer in near:
            for group in self._of(layer)[:1]:
                self._start(level, group)

    def _start(self, level: Level, group: _Group) -> None:
        """Gather ahead: fill the buffer of a group."""
        if group.unsharded or group.ahead or group.ranks == 1:
            return
        group.ahead = group.whole * self.bytes
        level.add(BUFFERS, group.ahead)
        if self.half:  # its own part in half precision
            level.passing(BUFFERS, group.shard * self.bytes)

    def _gather(self, level: Level, group: _Group, *, backward: bool) -> None:
        if group.unsharded:
            return
        self._start(level, group)
        group.unsharded = True
        if not backward:
            level.add(BUFFERS, -self.gathered)
            self.gathered = 0
        level.add(WEIGHTS, group.whole * self.bytes)
        buffer, group.ahead = group.ahead, 0
        if backward or self.config.forward_prefetch:
            level.add(BUFFERS, -buffer)
        else:
            self.gathered = buffer

    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        if unit is None:
            if not backward:
                level.add(BUFFERS, -self.gathered)
                self.gathered = 0
            return
        groups = self._of(unit)
        if backward:
            for group in reversed(groups):
                self._reduce(level, group)
        elif groups and self.gather == "block":
            left = len(self.layers) - 1 - self.layers.index(unit)
            if self.config.resharded(unit, left):
                for group in groups:
                    self._reshard(level, group)

    def _reshard(self, level: Level, group: _Group) -> None:
        if group.unsharded:
            group.unsharded = False
            level.add(WEIGHTS, -group.whole * self.bytes)

    def _reduce(self, level: Level, group: _Group) -> None:
        """Reduce the gradients of a group in a copy of fp32, and shard it again."""
        if self.gather == "step":
            if self.half:
                self._sum(level, group)
            if not self.last:
                return
            group.gradients, group.whole_sums = group.gradients + group.whole_sums, 0
        self._reshard(level, group)
        if not group.gradients:
            return
        level.add(BUFFERS, -self.reducing)
        self.reducing = group.whole * REDUCED
        level.add(BUFFERS, self.reducing)
        level.add(GRADIENTS, -group.gradients)
        group.gradients = 0
        if self.clones and group.ranks > 1:
            level.passing(BUFFERS, group.whole * REDUCED)
        reduced = group.shard * REDUCED
        level.passing(BUFFERS, reduced)
        if group.replicated and not group.summed and (group.reduced or self.copies):
            group.summed = True
            level.add(BUFFERS, reduced)
        if not group.reduced:
            group.reduced = True
            level.add(f"{self.host}{GRADIENTS}", reduced)

    def _sum(self, level: Level, group: _Group) -> None:
        """Add the gradients of a micro-batch to the whole sums."""
        if not group.whole_sums:
            group.whole_sums = group.gradients // self.bytes * REDUCED
            level.add(GRADIENTS, group.whole_sums - group.gradients)
        else:
            level.add(GRADIENTS, -group.gradients)
        group.gradients = 0

    last = False

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        self.last = last
        if name in self.fp32:
            if name not in self.sums:
                self.sums.add(name)
                level.add(GRADIENTS, size)
            return
        group = self.group_of[name]
        if self.gather == "step" and not self.half:  # sums of all micro-batches
            if name in self.sums:
                return
            self.sums.add(name)
        level.add(GRADIENTS, size)
        group.gradients += size

    def end_backward(self, level: Level, *, last: bool) -> None:
        self.last = last
        self._reduce(level, self.groups[None, False])
        if last:
            level.add(BUFFERS, -self.reducing)
            self.reducing = 0
            for group in self.groups.values():
                if group.summed:
                    group.summed = False
                    level.add(BUFFERS, -group.shard * REDUCED)

    def update(self, level: Level) -> None:
        largest = max((group.shard for group in self.groups.values()), default=0)
        level.passing("working", 8 * min(largest, 1 << 24))
