"""The part of a parameter that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from .axes import ALONE, Axis


@dataclass(frozen=True)
class Sharded:
    """Each rank has a part of dimension `dim`; or, given `blocks`, a part of each block."""

    dim: int
    blocks: tuple[int, ...] = ()
    """Sizes of the blocks that make up the dimension; empty for one block."""

    def runs(self, size: int, axis: Axis) -> tuple[range, ...]:
        """Indices along the dimension that this rank holds."""
        sizes = self.blocks or (size,)
        assert sum(sizes) == size, "the blocks make up the dimension"
        starts = accumulate(sizes, initial=0)
        parts = [axis.part_range(block) for block in sizes]
        return tuple(
            range(start + part.start, start + part.stop)
            for start, part in zip(starts, parts, strict=False)
        )


ShardingSpec = Mapping[str, Sharded]
"""Shards by the parameter's name, relative to the module that returns the spec."""


@dataclass(frozen=True)
class LocalShard:
    """Local shard of one parameter: the part that this rank holds."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dim: int = 0
    runs: tuple[range, ...] | None = None
    """Indices along `dim` that this rank holds, in this order; None: all."""
    copies: Axis = ALONE
    """Ranks that hold the same parameter, each with a part of its gradient. The gradient is their
    sum; the first of them counts it in the norm and writes it to checkpoints."""
    experts: bool = False
    """True if the ranks of the experts' axis hold different parts: then only replicas of the
    experts, not all data-parallel ranks, sum gradients and shard the state."""

    @property
    def stored(self) -> bool:
        """True on the rank of `copies` that counts and writes the parameter."""
        return self.copies.rank == 0

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of the local shard."""
        if self.runs is None:
            return self.shape
        size = sum(map(len, self.runs))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def filters(names: Iterable[str], groups: int, ranks: int, dim: int = 0) -> ShardingSpec:
    """Shard the parameters of filters that neighbouring channels share, if the ranks divide the
    filters evenly."""
    return dict.fromkeys(names, Sharded(dim)) if groups % ranks == 0 else {}
