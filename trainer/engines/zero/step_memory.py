"""Model DeepSpeed's memory over a step, for the memory accounting.

    stage   gradients in a backward pass                        at the end of the pass
    0       unsharded, to the end of the step                   last: a copy, to reduce
    1       unsharded, and a bucket                             last: a copy of this rank's shard
    1 bf16  unsharded in bf16 and in fp32                       a cast of each; last: a copy
    1 bf16, optimizer offloaded: cast immediately, then as in fp32
    2       into a bucket                                       this rank's shard; bf16: a cast
    3       into a bucket that stays                            copies of the bucket

ZeRO-2 in fp32 keeps full gradients for parameters on the edges of its shard. With
`offload_optimizer` these are in host memory, and ZeRO-1 writes its shard there without a copy.

ZeRO-3 keeps a gathered weight that it needs again within REUSED elements. So the layers of a model
below that size are unsharded from the forward to the backward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ....models.accounting.level import GRADIENTS, EngineMemory, Level, Unit
from ....models.accounting.state import HOST, Degrees, Shapes, Shards, StatePart, state_bytes
from ..shard_groups import parse_layer_number
from .memory import bucket_elements, largest_parameter

if TYPE_CHECKING:
    from ..config import StateOnDevice
    from .settings import ZeroConfig

REUSED = 1_000_000_000
"""DeepSpeed's stage3_max_reuse_distance."""
SUMS = 4
"""Bytes per element of summed gradients."""
BUFFERS = "buffers"
WEIGHTS = "weights"


class ZeroMemory(EngineMemory):
    def __init__(
        self,
        config: ZeroConfig,
        state: StateOnDevice,
        shards: Shards,
        degrees: Degrees,
        largest_bucket: int,
    ) -> None:
        """`largest_bucket` is the device's default."""
        self.config, self.fp32 = config, state.fp32
        self.stage, self.half = config.zero, state.precision.separate_masters
        self.offloads = config.offloads
        self.late = self.stage == 1 and self.half and not self.offloads
        """True if gradients are cast and reduced at the end of a backward pass."""
        self.bytes = state.precision.weight_bytes
        persistent = [tensors for tensors in state.parts if self._is_persistent(tensors)]
        self.persistent = state_bytes(persistent, shards, degrees)
        self.ranks = degrees.size(("dp", "cp"))
        zero_shards = {name: shard for name, shard in shards.items() if name not in self.fp32}
        shapes = {name: shard.local for name, shard in zero_shards.items()}
        self.elements = sum(map(math.prod, shapes.values()))
        self.largest_parameter = max(map(math.prod, shapes.values()), default=0)
        element = StatePart(name=GRADIENTS, bytes_per_parameter=1, sharded_over=("dp", "cp"))
        self.shard_elements = element.bytes(zero_shards, degrees)
        """Elements in this rank's shard of all gradients."""
        edges = partial(edge_elements, groups=state.groups)
        self.edge_elements = replace(element, cut=edges).bytes(zero_shards, degrees)
        """The same, with entire parameters on the shard's edges."""
        self.clones = state.device == "cpu"
        """True if a reduce-scatter clones its input, as gloo does."""
        self.bucket = bucket_elements(self.elements, config.reduce_bucket_size or largest_bucket)
        self.buckets = 1 + (self.stage < 3 and config.overlaps(state.precision, state.device))
        self.layers: dict[Unit, int] = {}
        """Elements that ZeRO-3 gathers, by unit."""
        for name, shape in shapes.items():
            is_small = math.prod(shape) <= config.persistent
            unit = parse_layer_number(name)
            self.layers.setdefault(unit, 0)
            self.layers[unit] += 0 if is_small else math.prod(shape)
        self.unsharded: set[Unit] = set()
        self.bucket_bytes = 0
        """Bytes in allocated buckets."""
        self.filled = 0
        """Elements in the bucket."""
        self.sums: dict[str, int] = {}
        """Gradients that live to the end of the step: bytes by parameter."""
        self.shard_bytes = 0
        """This rank's shard of the gradients, in bytes."""

    def _is_persistent(self, tensors: StatePart) -> bool:
        """Return whether tensors live from step to step."""
        name = tensors.name.removeprefix(HOST)
        if name == GRADIENTS and tensors.names != self.fp32:
            sums = self.late and tensors.bytes_per_parameter == SUMS
            return (
                self.stage == 3
                or sums
                or tensors.name.startswith(HOST)
                or tensors.cut is largest_parameter
            )
        if name == BUFFERS:
            return self.stage == 3
        return name != GRADIENTS

    def begin(self, level: Level) -> None:
        for kind, size in self.persistent.items():
            level.add(kind, size)
        if self.stage == 2 and self.offloads and not self.half:
            edges = (self.edge_elements - self.shard_elements) * self.bytes
            level.add(f"{HOST}{GRADIENTS}", edges)

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        if self.stage == 3 and self.ranks > 1 and unit not in self.unsharded:
            self.unsharded.add(unit)
            size = self.layers.get(unit, 0) * self.bytes
            level.add(WEIGHTS, size)

    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        if unit in self.unsharded and (backward or not self._is_reused_soon(unit)):
            self.unsharded.discard(unit)
            level.add(WEIGHTS, -self.layers.get(unit, 0) * self.bytes)

    def _is_reused_soon(self, unit: Unit) -> bool:
        """Return whether ZeRO-3 needs a layer again within REUSED elements."""
        later = sum(size for layer, size in self.layers.items() if (layer or 0) > (unit or 0))
        return unit is None or 2 * later <= REUSED

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        is_fp32 = name in self.fp32
        if self.stage in (1, 2) and not (is_fp32 or self.bucket_bytes or self.late):
            width = SUMS if self.stage == 1 else self.bytes
            self.bucket_bytes = self.bucket * width * self.buckets
            level.add(BUFFERS, self.bucket_bytes)
        if is_fp32 or self.stage < 2:
            if self.stage == 1 and self.half and not (is_fp32 or self.late):
                half_size, size = size, size // self.bytes * SUMS
                level.add_transient(GRADIENTS, half_size + size)
            if name not in self.sums:
                self.sums[name] = size
                level.add(GRADIENTS, size)
            return
        elements = size // self.bytes
        if self.filled + elements > self.bucket:
            self._reduce(level)
        self.filled += elements

    def _reduce(self, level: Level) -> None:
        """Reduce the bucket, and keep this rank's shard."""
        if self.stage == 3:
            width = 2 if self.config.communication_data_type == "bf16" else SUMS
            level.add_transient(BUFFERS, self.filled * width * (1 + self.clones))
        elif self.half:
            if not self.shard_bytes:
                self._keep_shard(level, self.shard_elements * SUMS)
            level.add_transient(BUFFERS, self.filled * SUMS)
        elif not self.offloads:
            if self.shard_bytes:
                level.add_transient(GRADIENTS, self.shard_bytes)
            else:
                self._keep_shard(level, self.edge_elements * self.bytes)
        self.filled = 0

    def _keep_shard(self, level: Level, size: int) -> None:
        self.shard_bytes = size
        level.add(GRADIENTS, size)

    def end_backward(self, level: Level, *, last: bool) -> None:
        if self.stage >= 2:
            self._reduce(level)
        elif self.late:
            level.add_transient(BUFFERS, self.largest_parameter * SUMS)
        if last and self.stage == 0:
            level.add_transient(BUFFERS, sum(self.sums.values()))
        if last and self.late:
            level.add_transient(BUFFERS, self.elements * SUMS)
        if last and self.stage == 1 and not self.late:
            if not self.offloads:
                self._keep_shard(level, self.shard_elements * SUMS)
            for name in [name for name in self.sums if name not in self.fp32]:
                level.add(GRADIENTS, -self.sums.pop(name))
        if self.stage != 1 or last:
            level.add(BUFFERS, -self.bucket_bytes)
            self.bucket_bytes = 0

    def save(self) -> Hashable:
        sums, unsharded = tuple(self.sums.items()), frozenset(self.unsharded)
        return unsharded, self.bucket_bytes, self.filled, sums, self.shard_bytes

    def restore(self, saved: Any) -> None:
        unsharded, self.bucket_bytes, self.filled, sums, self.shard_bytes = saved
        self.unsharded, self.sums = set(unsharded), dict(sums)

    def update(self, level: Level) -> None:
        if self.stage in (1, 2) and not (self.half or self.offloads):
            level.add_transient(GRADIENTS, self.shard_elements * SUMS)
        level.add_transient("working", 8 * min(self.largest_parameter, 1 << 24))


def edge_elements(shapes: Shapes, ranks: int, *, groups: Sequence[Sequence[str]]) -> int:
    """Return the number of elements in all parameters that reach into a rank's shard; the maximum
    over ranks. A group's parameters are concatenated and cut evenly."""
    elements_by_rank: Counter[int] = Counter()
    for group in groups:
        sizes = [math.prod(shapes[name]) for name in group if name in shapes]
        shard = max(1, -(-sum(sizes) // ranks))
        for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            for rank in range(begin // shard, (begin + size - 1) // shard + 1):
                elements_by_rank[rank] += size
    return max(elements_by_rank.values(), default=0)
