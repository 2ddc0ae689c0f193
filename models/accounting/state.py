"""Training state of one rank: weights, gradients, masters, optimizer states and buffers.

An engine's configuration lists what the engine holds as `StatePart`s: bytes per parameter, the
axes that shard them, and how they are cut. `state_bytes` adds them up for a model. There is no
second accounting: `headrace models show` and `trainer run --dry-run` both print these numbers.

Tensor and expert parallelism are no axes here: all parts are counted from the local shards of one
rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..parallel.local_shard import LocalShard

HOST = "host "
"""Beginning of the names of parts that lie in host memory, beside a rank's device."""
AxisName = Literal["dp", "cp"]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Shape of local shards, by the parameter's logical name."""
Shards = Mapping[str, LocalShard]
"""Local shard of each parameter on one rank, by logical name; tied parameters once."""
BytesPerParameter = int | Callable[[str], int]
"""A function of the parameter's logical name where parameters differ."""
Cut = Callable[[Shapes, int], int]
"""Return the elements that one rank holds of these parameters, sharded among that many ranks."""


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of data, tensor and context parallelism, and of experts among those ranks."""

    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.cp, self.ep) < 1:
            raise ValueError(f"dp, tp, cp and ep must be at least 1: {self}")

    def size(self, axes: Sequence[AxisName]) -> int:
        """Ranks along these axes together."""
        return math.prod(getattr(self, axis) for axis in axes)


def flat(shapes: Shapes, ranks: int) -> int:
    """Lay the parameters end to end and cut the whole evenly."""
    return -(-elements(shapes.values()) // ranks)


def by_parameter(shapes: Shapes, ranks: int) -> int:
    """Cut each parameter evenly; the last shard is padded."""
    return sum(-(-math.prod(shape) // ranks) for shape in shapes.values())


def by_rows(shapes: Shapes, ranks: int) -> int:
    """Deal out the rows (dimension 0) of each parameter; the first rank holds the most."""
    shaped = (shape or (1,) for shape in shapes.values())  # a scalar is one row
    return sum(-(-rows // ranks) * math.prod(rest) for rows, *rest in shaped)


def outside_blocks(shapes: Shapes, ranks: int) -> int:
    """Count embeddings, head, final norm and shared blocks: no layer holds them. All are whole."""
    return elements(shape for name, shape in shapes.items() if not name.startswith("blocks."))


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """A part of the state that a rank holds from one backward pass to the next or longer."""

    name: str
    """weights, gradients, masters, optimizer, buffers. Entries of one name are added. With `HOST`
    before it: in host memory."""
    bytes_per_parameter: BytesPerParameter
    sharded_over: tuple[AxisName, ...] = ()
    """Axes whose ranks share one copy. Empty: each rank holds all of it."""
    shard_ranks: int | Callable[[str], int | None] | None = None
    """Ranks that share one copy, where they are fewer than those of the axes (HSDP). A function of
    the parameter's logical name where parameters differ."""
    cut: Cut = flat
    names: Collection[str] | None = None
    """Parameters of which the part is, by logical name; None: all."""

    def bytes(self, shards: Shards, degrees: Degrees) -> int:
        """Bytes on the rank that holds the most."""
        each = self.bytes_per_parameter
        alike: dict[tuple[int, int], dict[str, Shape]] = {}
        for name, shard in shards.items():
            if self.names is not None and name not in self.names:
                continue
            key = (each(name) if callable(each) else each, self.ranks(degrees, name, shard))
            alike.setdefault(key, {})[name] = shard.local
        return sum(size * self.cut(shapes, ranks) for (size, ranks), shapes in alike.items())

    def ranks(self, degrees: Degrees, name: str, shard: LocalShard) -> int:
        """Ranks that share one copy of a parameter. ep ranks have different experts, so ep / tp
        times fewer share a copy of them."""
        own = self.shard_ranks
        ranks = (own(name) if callable(own) else own) or degrees.size(self.sharded_over)
        return max(1, ranks * degrees.tp // degrees.ep) if shard.experts else ranks


def state_bytes(parts: Sequence[StatePart], shards: Shards, degrees: Degrees) -> dict[str, int]:
    """Bytes of each part of the state on one rank, by name."""
    totals: dict[str, int] = {}
    for part in parts:
        totals[part.name] = totals.get(part.name, 0) + part.bytes(shards, degrees)
    return totals


def host_bytes(parts: Mapping[str, int]) -> int:
    """Bytes of the parts that lie in host memory."""
    return sum(size for name, size in parts.items() if name.startswith(HOST))


def device_bytes(parts: Mapping[str, int]) -> int:
    """Bytes of the other parts."""
    return sum(parts.values()) - host_bytes(parts)


def elements(shapes: Iterable[Shape]) -> int:
    """Return the elements of all these parameters."""
    return sum(math.prod(shape) for shape in shapes)
