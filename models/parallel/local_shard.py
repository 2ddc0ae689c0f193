"""Local shard: a rank's slice of a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from .axes import ALONE, Axis


@dataclass(frozen=True)
class Sharded:
    """Each rank has a slice along `dim`, or with `blocks` a slice of each block."""

    dim: int
    blocks: tuple[int, ...] = ()
    """Block sizes along the dimension; empty for a single block."""

    def runs(self, size: int, axis: Axis) -> tuple[range, ...]:
        """Return this rank's indices along the dimension."""
        sizes = self.blocks or (size,)
        assert sum(sizes) == size, "the blocks make up the dimension"
        starts = accumulate(sizes, initial=0)
        block_ranges = [axis.part_range(block) for block in sizes]
        return tuple(
            range(start + indices.start, start + indices.stop)
            for start, indices in zip(starts, block_ranges, strict=False)
        )


ShardingSpec = Mapping[str, Sharded]
"""Sharding by parameter name, relative to the module that returns the spec."""


@dataclass(frozen=True)
class LocalShard:
    """A rank's slice of a parameter."""

    shape: tuple[int, ...]
    """Unsharded parameter shape."""
    dim: int = 0
    runs: tuple[range, ...] | None = None
    """This rank's indices along `dim`, in order; None: all."""
    copies: Axis = ALONE
    """Ranks with parameter copies and partial gradients, to be summed. The first rank counts the
    parameter in the norm and writes it to checkpoints."""
    experts: bool = False
    """True if ranks on the expert axis hold different experts: then only the experts' replicas, not
    all data-parallel ranks, sum gradients and shard the state."""

    @property
    def stored(self) -> bool:
        """True on the rank in `copies` that counts and writes the parameter."""
        return self.copies.rank == 0

    @property
    def local(self) -> tuple[int, ...]:
        """Local shard shape."""
        if self.runs is None:
            return self.shape
        size = sum(map(len, self.runs))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def shard_filters(names: Iterable[str], groups: int, ranks: int, dim: int = 0) -> ShardingSpec:
    """Shard filter parameters that adjacent channels share, if `ranks` divides `groups`."""
    return dict.fromkeys(names, Sharded(dim)) if groups % ranks == 0 else {}
