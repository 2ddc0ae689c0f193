"""Model FSDP2's memory over a step, for the memory accounting.

    forward of a block    gather: buffer, then unsharded weights; the buffer waits for the next one
    after the forward     unsharded weights are freed, if the block is resharded
    backward              gather, prefetch of the next block's buffer (the last block's during the
                          loss), unsharded gradients
    after the backward    an fp32 copy of the gradients is reduced; it stays to the next reduction,
                          also in the next micro-batch
      gather: step        unsharded gradients stay to the last micro-batch; in bf16, fp32 sums do
      HSDP                torch keeps the shards that it sums over replicas to the end of the last
                          backward pass. In the first micro-batch the shard is the gradient

Parameters outside blocks (embedding, final norm, head, shared blocks) are unsharded from the first
forward to the end of the backward pass. A single rank gathers nothing, but makes the copies. Split
experts are gathered and reduced separately from their block's other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ...models.accounting.level import GRADIENTS, EngineMemory, Level, Unit
from ...models.accounting.state import (
    HOST,
    Degrees,
    Shapes,
    Shards,
    cut_root,
    state_bytes,
)
from .shard_groups import parse_layer_number

if TYPE_CHECKING:
    from ..layout.config import LayoutConfig
    from .config import StateOnDevice

WEIGHTS = "weights"
BUFFERS = "buffers"
REDUCED_BYTES = 4
"""Bytes of a number in a reduced gradient: fp32."""


class Fsdp2Settings(Protocol):
    """FSDP2's settings that affect memory."""

    @property
    def forward_prefetch(self) -> int: ...
    @property
    def backward_prefetch(self) -> int: ...
    @property
    def offloads(self) -> bool: ...
    def gather_mode(self, layout: LayoutConfig) -> str: ...
    def reshards(self, layer: int, num_later_layers: int) -> bool: ...


@dataclass
class _GatherGroup:
    """Parameters that are gathered together."""

    numel: int
    """Unsharded elements, padded to equal shards."""
    shard_numel: int
    """Elements in the largest shard."""
    ranks: int
    """Ranks over which a copy is sharded."""
    replicated: bool = False
    """True if other ranks have copies of the shards."""
    prefetched: int = 0
    """Bytes in the prefetch buffer."""
    unsharded: bool = False
    gradients: int = 0
    """Unsharded gradients in bytes."""
    gradient_sums: int = 0
    """Unsharded fp32 sums of half-precision gradients, in bytes."""
    reduced: bool = False
    """True if the rank holds the reduced gradient."""
    summed: bool = False
    """True if torch also keeps the shard that was summed over replicas."""

    def save(self) -> Hashable:
        """Return what the events of a step change."""
        gradients = self.gradients, self.gradient_sums, self.reduced, self.summed
        return self.prefetched, self.unsharded, gradients

    def restore(self, saved: Any) -> None:
        self.prefetched, self.unsharded, gradients = saved
        self.gradients, self.gradient_sums, self.reduced, self.summed = gradients


def count_unsharded(shapes: Shapes, ranks: int, *, engine: Fsdp2Settings, num_gathered: int) -> int:
    """Return a rank's maximum number of unsharded elements with `gather: block`: parameters outside
    blocks, `num_gathered` consecutive blocks, and earlier blocks that are not resharded."""
    sizes: dict[int, int] = {}
    for parameter, shape in shapes.items():
        if (layer := parse_layer_number(parameter)) is not None:
            sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
    layers = sorted(sizes)
    not_resharded: list[int] = []
    max_size = 0
    for index, layer in enumerate(layers):
        if not engine.reshards(layer, len(layers) - 1 - index):
            not_resharded.append(layer)
        unsharded = {*not_resharded, *layers[index : index + num_gathered]}
        max_size = max(max_size, sum(sizes[number] for number in unsharded))
    return cut_root(shapes, ranks) + max_size


class Fsdp2Memory(EngineMemory):
    def __init__(
        self, config: Fsdp2Settings, state: StateOnDevice, shards: Shards, degrees: Degrees
    ) -> None:
        self.config, self.fp32 = config, state.fp32
        self.gather = config.gather_mode(state.layout)
        self.half = state.precision.separate_masters
        self.clones = state.device == "cpu"
        """True if a reduce-scatter clones its input, as gloo does."""
        self.bytes = state.precision.weight_bytes
        self.host = HOST if config.offloads else ""
        self.copies = config.offloads and state.device != "cpu"
        """True if the gradient is a copy of the reduced buffer, not a view."""
        persistent = [
            tensors
            for tensors in state.parts
            if (tensors.sharded_over or tensors.names == state.fp32)
            and not tensors.name.endswith(GRADIENTS)
        ]
        self.persistent = state_bytes(persistent, shards, degrees)
        self.groups: dict[tuple[Unit, bool], _GatherGroup] = {(None, False): _GatherGroup(0, 0, 1)}
        """By unit, and whether the parameters are split experts."""
        self.group_by_parameter: dict[str, _GatherGroup] = {}
        sharded = next(tensors for tensors in persistent if tensors.sharded_over)
        fully_sharded = replace(sharded, shard_ranks=None)
        for name, shard in shards.items():
            if name in self.fp32:
                continue
            ranks = sharded.ranks(degrees, name, shard)
            key = parse_layer_number(name), shard.experts
            group = self.groups.setdefault(key, _GatherGroup(0, 0, ranks))
            self.group_by_parameter[name] = group
            group.ranks = max(group.ranks, ranks)
            group.replicated |= ranks < fully_sharded.ranks(degrees, name, shard)
            rows, *row_shape = shard.local or (1,)
            shard_numel = -(-rows // ranks) * math.prod(row_shape)
            group.shard_numel += shard_numel
            group.numel += shard_numel * ranks
        self.layers = sorted({unit for unit, _ in self.groups if unit is not None})
        self.gathered = 0
        """Bytes in the last gather's buffer."""
        self.reducing = 0
        """Bytes in the last reduction's copy."""
        self.sums: set[str] = set()

    def begin(self, level: Level) -> None:
        for kind, size in self.persistent.items():
            level.add(kind, size)

    def _groups_in(self, unit: Unit) -> list[_GatherGroup]:
        """Return a unit's groups: split experts come after other parameters."""
        return [self.groups[unit, split] for split in (False, True) if (unit, split) in self.groups]

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        for group in self._groups_in(unit):
            self._gather(level, group, backward=backward)
        if self.gather != "block":
            return
        if unit is None:  # no prefetch is set for it: torch prefetches the last block
            next_layers = self.layers[-1:] if backward and self.groups[None, False].numel else []
        elif unit not in self.layers:
            return
        elif backward:
            next_layers = [layer for layer in reversed(self.layers) if layer < unit]
            next_layers = next_layers[: self.config.backward_prefetch]
        else:
            next_layers = [layer for layer in self.layers if layer > unit]
            next_layers = next_layers[: self.config.forward_prefetch]
        for layer in next_layers:
            for group in self._groups_in(layer)[:1]:
                self._prefetch(level, group)

    def _prefetch(self, level: Level, group: _GatherGroup) -> None:
        """Gather a group's weights into a buffer."""
        if group.unsharded or group.prefetched or group.ranks == 1:
            return
        group.prefetched = group.numel * self.bytes
        level.add(BUFFERS, group.prefetched)
        if self.half:  # this rank's shard is cast before it is sent
            level.add_transient(BUFFERS, group.shard_numel * self.bytes)

    def _gather(self, level: Level, group: _GatherGroup, *, backward: bool) -> None:
        if group.unsharded:
            return
        self._prefetch(level, group)
        group.unsharded = True
        if not backward:
            level.add(BUFFERS, -self.gathered)
            self.gathered = 0
        level.add(WEIGHTS, group.numel * self.bytes)
        buffer, group.prefetched = group.prefetched, 0
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
        groups = self._groups_in(unit)
        if backward:
            for group in reversed(groups):
                self._reduce(level, group)
        elif groups and self.gather == "block":
            num_later_layers = len(self.layers) - 1 - self.layers.index(unit)
            if self.config.reshards(unit, num_later_layers):
                for group in groups:
                    self._reshard(level, group)

    def _reshard(self, level: Level, group: _GatherGroup) -> None:
        if group.unsharded:
            group.unsharded = False
            level.add(WEIGHTS, -group.numel * self.bytes)

    def _reduce(self, level: Level, group: _GatherGroup) -> None:
        """Reshard a group, and reduce an fp32 copy of its gradients."""
        if self.gather == "step":
            if self.half:
                self._accumulate(level, group)
            if not self.last:
                return
            group.gradients, group.gradient_sums = group.gradients + group.gradient_sums, 0
        self._reshard(level, group)
        if not group.gradients:
            return
        level.add(BUFFERS, -self.reducing)
        self.reducing = group.numel * REDUCED_BYTES
        level.add(BUFFERS, self.reducing)
        level.add(GRADIENTS, -group.gradients)
        group.gradients = 0
        if self.clones and group.ranks > 1:
            level.add_transient(BUFFERS, group.numel * REDUCED_BYTES)
        shard_bytes = group.shard_numel * REDUCED_BYTES
        level.add_transient(BUFFERS, shard_bytes)
        if group.replicated and not group.summed and (group.reduced or self.copies):
            group.summed = True
            level.add(BUFFERS, shard_bytes)
        if not group.reduced:
            group.reduced = True
            level.add(f"{self.host}{GRADIENTS}", shard_bytes)

    def _accumulate(self, level: Level, group: _GatherGroup) -> None:
        """Add a micro-batch's gradients to the unsharded fp32 sums."""
        if not group.gradient_sums:
            group.gradient_sums = group.gradients // self.bytes * REDUCED_BYTES
            level.add(GRADIENTS, group.gradient_sums - group.gradients)
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
        group = self.group_by_parameter[name]
        if self.gather == "step" and not self.half:  # all micro-batches accumulate in place
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
                    level.add(BUFFERS, -group.shard_numel * REDUCED_BYTES)

    def save(self) -> Hashable:
        groups = tuple(group.save() for group in self.groups.values())
        return groups, self.gathered, self.reducing, frozenset(self.sums), self.last

    def restore(self, saved: Any) -> None:
        groups, self.gathered, self.reducing, sums, self.last = saved
        for group, values in zip(self.groups.values(), groups, strict=True):
            group.restore(values)
        self.sums = set(sums)

    def update(self, level: Level) -> None:
        largest = max((group.shard_numel for group in self.groups.values()), default=0)
        level.add_transient("working", 8 * min(largest, 1 << 24))
