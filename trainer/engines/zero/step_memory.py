"""Memory of DeepSpeed over a step, for the memory accounting.

    stage   gradients in a backward pass                        at its end
    0       whole, to the end of the step                       last: a copy, to reduce
    1       whole, and a bucket                                 last: a copy of the own part
    1 bf16  whole in bf16 and in fp32                           a cast of each; last: a copy
    1 bf16, optimizer offloaded: each is cast at once, then as in fp32
    2       into a bucket                                       the own part; bf16: a cast
    3       into a bucket that stays                            copies of the bucket

ZeRO-2 in fp32 keeps whole gradients of the parameters on the edges of its part. With
`offload_optimizer` these are in host memory, and ZeRO-1 writes its part there without a copy.

ZeRO-3 keeps a gathered weight that it needs again soon: up to REUSED elements later. So a model
below that size is whole from the forward pass of a layer to its backward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from ....models.accounting.level import GRADIENTS, EngineMemory, Level, Unit
from ....models.accounting.state import HOST, Degrees, Shapes, Shards, StatePart, state_bytes
from ..shard_groups import layer_of
from .memory import bucket_elements, largest

if TYPE_CHECKING:
    from ..config import StateOnDevice
    from .settings import ZeroConfig

REUSED = 1_000_000_000
"""DeepSpeed's stage3_max_reuse_distance."""
SUMS = 4
"""Bytes of a number of summed gradients."""
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
        """`largest_bucket` is the default of the device."""
        self.config, self.fp32 = config, state.fp32
        self.stage, self.half = config.zero, state.precision.separate_masters
        self.offloads = config.offloads
        self.late = self.stage == 1 and self.half and not self.offloads
        """True if gradients are cast and reduced at the end of a backward pass."""
        self.bytes = state.precision.weight_bytes
        lasting = [part for part in state.parts if self._lasts(part)]
        self.lasting = state_bytes(lasting, shards, degrees)
        self.ranks = degrees.size(("dp", "cp"))
        kept = {name: shard for name, shard in shards.items() if name not in self.fp32}
        own = {name: shard.local for name, shard in kept.items()}
        self.elements = sum(map(math.prod, own.values()))
        self.largest = max(map(math.prod, own.values()), default=0)
        part = StatePart(name=GRADIENTS, bytes_per_parameter=1, sharded_over=("dp", "cp"))
        self.part = part.bytes(kept, degrees)
        """Elements of this rank's part of all gradients."""
        edges = partial(touched, groups=state.groups)
        self.with_edges = replace(part, cut=edges).bytes(kept, degrees)
        """The same with the whole of a parameter on the edge of the part."""
        self.clones = state.device == "cpu"
        """True if a reduce-scatter clones what it sends: gloo does."""
        self.bucket = bucket_elements(self.elements, config.reduce_bucket_size or largest_bucket)
        self.buckets = 1 + (self.stage < 3 and config.overlaps(state.precision, state.device))
        self.layers: dict[Unit, int] = {}
        """Elements that ZeRO-3 gathers for each part."""
        for name, shape in own.items():
            small = math.prod(shape) <= config.persistent
            unit = layer_of(name)
            self.layers.setdefault(unit, 0)
            self.layers[unit] += 0 if small else math.prod(shape)
        self.whole: set[Unit] = set()
        self.held = 0
        """Bytes of the buckets."""
        self.filled = 0
        """Elements in the bucket."""
        self.sums: dict[str, int] = {}
        """Bytes of the gradients that live to the end of the step."""
        self.parted = 0
        """Bytes of this rank's part of the gradients."""

    def _lasts(self, part: StatePart) -> bool:
        """Return True for a part that lives from step to step."""
        name = part.name.removeprefix(HOST)
        if name == GRADIENTS and part.names != self.fp32:
            sums = self.late and part.bytes_per_parameter == SUMS
            return self.stage == 3 or sums or part.name.startswith(HOST) or part.cut is largest
        if name == BUFFERS:
            return self.stage == 3
        return name != GRADIENTS

    def begin(self, level: Level) -> None:
        for name, size in self.lasting.items():
            level.add(name, size)
        if self.stage == 2 and self.offloads and not self.half:
            level.add(f"{HOST}{GRADIENTS}", (self.with_edges - self.part) * self.bytes)

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        if self.stage == 3 and self.ranks > 1 and unit not in self.whole:
            self.whole.add(unit)
            size = self.layers.get(unit, 0) * self.bytes
            level.add(WEIGHTS, size)

    def leave(self, level: Level, unit: Unit, *, backward: bool) -> None:
        if unit in self.whole and (backward or self._far(unit)):
            self.whole.discard(unit)
            level.add(WEIGHTS, -self.layers.get(unit, 0) * self.bytes)

    def _far(self, unit: Unit) -> bool:
        """Return True if ZeRO-3 needs a layer again only after too many elements."""
        after = sum(size for each, size in self.layers.items() if (each or 0) > (unit or 0))
        return unit is not None and 2 * after > REUSED

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        own = name in self.fp32
        if self.stage in (1, 2) and not (own or self.held or self.late):
            width = SUMS if self.stage == 1 else self.bytes
            self.held = self.bucket * width * self.buckets
            level.add(BUFFERS, self.held)
        if own or self.stage < 2:
            if self.stage == 1 and self.half and not (own or self.late):
                cast, size = size, size // self.bytes * SUMS
                level.passing(GRADIENTS, cast + size)
            if name not in self.sums:
                self.sums[name] = size
                level.add(GRADIENTS, size)
            return
        elements = size // self.bytes
        if self.filled + elements > self.bucket:
            self._reduce(level)
        self.filled += elements

    def _reduce(self, level: Level) -> None:
        """Reduce what is in the bucket, and keep this rank's part."""
        if self.stage == 3:
            width = 2 if self.config.communication_data_type == "bf16" else SUMS
            level.passing(BUFFERS, self.filled * width * (1 + self.clones))
        elif self.half:
            if not self.parted:
                self._keep(level, self.part * SUMS)
            level.passing(BUFFERS, self.filled * SUMS)
        elif not self.offloads:
            if self.parted:
                level.passing(GRADIENTS, self.parted)
            else:
                self._keep(level, self.with_edges * self.bytes)
        self.filled = 0

    def _keep(self, level: Level, size: int) -> None:
        self.parted = size
        level.add(GRADIENTS, size)

    def end_backward(self, level: Level, *, last: bool) -> None:
        if self.stage >= 2:
            self._reduce(level)
        elif self.late:
            level.passing(BUFFERS, self.largest * SUMS)
        if last and self.stage == 0:
            level.passing(BUFFERS, sum(self.sums.values()))
        if last and self.late:
            level.passing(BUFFERS, self.elements * SUMS)
        if last and self.stage == 1 and not self.late:
            if not self.offloads:
                self._keep(level, self.part * SUMS)
            for name in [name for name in self.sums if name not in self.fp32]:
                level.add(GRADIENTS, -self.sums.pop(name))
        if self.stage != 1 or last:
            level.add(BUFFERS, -self.held)
            self.held = 0

    def update(self, level: Level) -> None:
        if self.stage in (1, 2) and not (self.half or self.offloads):
            level.passing(GRADIENTS, self.part * SUMS)
        level.passing("working", 8 * min(self.largest, 1 << 24))


def touched(shapes: Shapes, ranks: int, *, groups: Sequence[Sequence[str]]) -> int:
    """Return the elements of the parameters that reach into a rank's part, on the rank with the
    most. Each group's parameters lie end to end and are cut evenly."""
    by_rank: Counter[int] = Counter()
    for group in groups:
        sizes = [math.prod(shapes[name]) for name in group if name in shapes]
        part = max(1, -(-sum(sizes) // ranks))
        for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            for rank in range(begin // part, (begin + size - 1) // part + 1):
                by_rank[rank] += size
    return max(by_rank.values(), default=0)
