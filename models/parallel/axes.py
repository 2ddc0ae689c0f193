"""The axes along which a model is sharded, and this rank's position on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..config.options.names import AttentionForm, LongFilterForm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """One axis of a layout: its process group, and this rank's position in it."""

    group: ProcessGroup | None
    rank: int
    size: int

    def __reduce__(self) -> tuple[type[Axis], tuple[None, int, int]]:
        """Pickle rank and size: a process group has no meaning in another process."""
        return Axis, (None, self.rank, self.size)

    def part_range(self, number: int) -> range:
        """Indices of this rank, if `number` items are split into contiguous parts."""
        return range(number * self.rank // self.size, number * (self.rank + 1) // self.size)

    def part(self, number: int) -> slice:
        """`part_range` as a slice."""
        indices = self.part_range(number)
        return slice(indices.start, indices.stop)

    def ranks(self) -> list[Axis]:
        """The axis as each of its ranks sees it."""
        return [replace(self, rank=rank) for rank in range(self.size)]

    @property
    def name(self) -> str:
        """Name of the process group, for custom ops, which cannot take an Axis; empty for one
        rank."""
        return self.group.group_name if self.group is not None and self.size > 1 else ""


ALONE = Axis(None, 0, 1)
"""An axis of one rank."""


@dataclass(frozen=True)
class Holders:
    """Ranks that hold the parameters of one module alike, on one stage or on several."""

    sharded: Axis = ALONE
    """Holders of a parameter's local shard, if tensor parallelism shards the parameter."""
    whole: Axis = ALONE
    """Holders of a parameter that tensor parallelism does not shard."""


@dataclass(frozen=True)
class Axes:
    """The axes that shard a model. (Data parallelism splits the batch; the model is unaware.)"""

    tensor: Axis = ALONE
    """Tensor parallelism: heads, channels and the vocabulary are sharded."""
    context: Axis = ALONE
    """Context parallelism: each rank has a contiguous part of every row, in the order of ranks."""
    attention: AttentionForm = "a2a"
    """Form of attention under context parallelism."""
    hyena_li: LongFilterForm = "states"
    """Form of modal Hyena-LI filters. (Free-form filters have no states and always use a2a.)"""
    experts: Axis = ALONE
    """Expert parallelism: each rank has equally many experts, in the order of ranks. The axis
    contains whole tensor axes."""
    parts: Axis = ALONE
    """context × tensor, if experts are sharded: ranks that hold the parts of the same rows."""

    def of_parts(self) -> Axes:
        """The axes of an operator that maps this rank's part of each sequence, and is not sharded
        over the tensor axis: the tensor axis divides rows as the context axis does."""
        return replace(self, tensor=ALONE, context=self.parts)

    shared: Mapping[str, Holders] = field(default_factory=dict)
    """Modules that several stages of a pipeline hold, by path: tied embeddings, shared blocks."""

    def holders(self, parameter: str) -> Holders:
        """Return the ranks that hold a parameter."""
        for path, holders in self.shared.items():
            if parameter.startswith(f"{path}."):
                return holders
        return Holders(whole=self.tensor if self.tensor.size > 1 else ALONE)
