"""A rank's training state: weights, gradients, masters, optimizer states and buffers.

An engine's configuration lists its state as `StatePart`s: bytes per parameter, sharding axes, and
how parameters are cut. `state_bytes` adds them up for a model. There is no second accounting:
`headrace models show` and `trainer run --dry-run` both print these numbers.

Tensor and expert parallelism are no axes here: a rank's local shards already include them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..parallel.local_shard import LocalShard

HOST = "host "
"""Prefix for parts in host memory instead of device memory."""
AxisName = Literal["dp", "cp"]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Local shard shapes, by logical parameter name."""
Shards = Mapping[str, LocalShard]
"""A rank's local shards, by logical parameter name; tied parameters once."""
BytesPerParameter = int | Callable[[str], int]
"""A function of the parameter's logical name where parameters differ."""
Cut = Callable[[Shapes, int], int]
"""Return the elements per rank when these parameters are sharded over so many ranks."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Data, tensor, context and expert parallelism degrees; ep divides the same ranks."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.cp, self.ep) < 1:
            raise ValueError(f"dp, tp, cp and ep must be at least 1: {self}")

    def size(self, axes: Sequence[AxisName]) -> int:
        """Multiply the degrees of these axes."""
        return math.prod(getattr(self, axis) for axis in axes)


def cut_flat(shapes: Shapes, ranks: int) -> int:
    """Concatenate the parameters and cut the flat tensor evenly."""
    return -(-elements(shapes.values()) // ranks)


def cut_parameters(shapes: Shapes, ranks: int) -> int:
    """Cut each parameter evenly; the last shard is padded."""
    return sum(-(-math.prod(shape) // ranks) for shape in shapes.values())


def cut_rows(shapes: Shapes, ranks: int) -> int:
    """Cut each parameter along dimension 0; the first rank holds the largest shard."""
    shaped = (shape or (1,) for shape in shapes.values())  # a scalar is one row
    return sum(-(-rows // ranks) * math.prod(inner) for rows, *inner in shaped)


def cut_root(shapes: Shapes, ranks: int) -> int:
    """Count embeddings, head, final norm and shared blocks, which no layer holds: not sharded."""
    return elements(shape for name, shape in shapes.items() if not name.startswith("blocks."))


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """A part of a rank's state that survives a backward pass."""

    name: str
    """weights, gradients, masters, optimizer, buffers. Parts with the same name are added. The
    prefix `HOST` means host memory."""
    bytes_per_parameter: BytesPerParameter
    sharded_over: tuple[AxisName, ...] = ()
    """Axes whose ranks share a copy. Empty: every rank holds a full copy."""
    shard_ranks: int | Callable[[str], int | None] | None = None
    """Ranks that share a copy, where they are fewer than the axes' ranks (HSDP); called with the
    parameter's logical name where parameters differ."""
    cut: Cut = cut_flat
    names: Collection[str] | None = None
    """Logical parameter names; None: all."""

    def bytes(self, shards: Shards, degrees: Degrees) -> int:
        """Count bytes on the rank with the largest shard."""
        per_parameter, axis_ranks = self.bytes_per_parameter, degrees.size(self.sharded_over)
        groups: dict[tuple[int, int], dict[str, Shape]] = {}
        for name, shard in shards.items():
            if self.names is not None and name not in self.names:
                continue
            key = (
                per_parameter(name) if callable(per_parameter) else per_parameter,
                self._ranks(degrees, axis_ranks, name, shard),
            )
            groups.setdefault(key, {})[name] = shard.local
        return sum(size * self.cut(shapes, ranks) for (size, ranks), shapes in groups.items())

    def ranks(self, degrees: Degrees, name: str, shard: LocalShard) -> int:
        """Count the ranks that share a parameter copy. The ep ranks have different experts, so ep /
        tp times fewer ranks share an expert's copy."""
        return self._ranks(degrees, degrees.size(self.sharded_over), name, shard)

    def _ranks(self, degrees: Degrees, axis_ranks: int, name: str, shard: LocalShard) -> int:
        shard_ranks = self.shard_ranks
        ranks = (shard_ranks(name) if callable(shard_ranks) else shard_ranks) or axis_ranks
        return max(1, ranks * degrees.tp // degrees.ep) if shard.experts else ranks


def state_bytes(
    state_parts: Sequence[StatePart], shards: Shards, degrees: Degrees
) -> dict[str, int]:
    """Count a rank's state in bytes, by part name."""
    totals: dict[str, int] = {}
    for state_part in state_parts:
        totals[state_part.name] = totals.get(state_part.name, 0) + state_part.bytes(shards, degrees)
    return totals


def host_bytes(bytes_by_name: Mapping[str, int]) -> int:
    """Sum the parts in host memory."""
    return sum(size for name, size in bytes_by_name.items() if name.startswith(HOST))


def device_bytes(bytes_by_name: Mapping[str, int]) -> int:
    """Sum the parts in device memory."""
    return sum(bytes_by_name.values()) - host_bytes(bytes_by_name)


def elements(shapes: Iterable[Shape]) -> int:
    """Count these parameters' elements."""
    return sum(math.prod(shape) for shape in shapes)
