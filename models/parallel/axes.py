"""Axes that shard a model, and this rank's position on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..config.options.names import AttentionForm, DeltaForm, LongFilterForm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """Layout axis: a process group, and this rank's position in it."""

    group: ProcessGroup | None
    rank: int
    size: int

    def __reduce__(self) -> tuple[type[Axis], tuple[None, int, int]]:
        """Pickle rank and size: a process group has no meaning in another process."""
        return Axis, (None, self.rank, self.size)

    def part_range(self, number: int) -> range:
        """Return this rank's indices, if `number` items are split into contiguous parts."""
        return range(number * self.rank // self.size, number * (self.rank + 1) // self.size)

    def part(self, number: int) -> slice:
        """Return `part_range` as a slice."""
        indices = self.part_range(number)
        return slice(indices.start, indices.stop)

    def ranks(self) -> list[Axis]:
        """Return the axis as seen by each rank."""
        return [replace(self, rank=rank) for rank in range(self.size)]

    @property
    def name(self) -> str:
        """Process group name, for custom ops, which cannot take an Axis; empty for a single
        rank."""
        return self.group.group_name if self.group is not None and self.size > 1 else ""


ALONE = Axis(None, 0, 1)
"""Axis with a single rank."""


@dataclass(frozen=True)
class Holders:
    """Ranks with copies of a module's parameters, on one or more stages."""

    sharded: Axis = ALONE
    """Ranks with copies of the same local shard, for parameters that tensor parallelism shards."""
    replicated: Axis = ALONE
    """Ranks with copies of unsharded parameters."""


@dataclass(frozen=True)
class Axes:
    """Axes that shard a model. (Data parallelism splits the batch; the model is unaware.)"""

    tensor: Axis = ALONE
    """Tensor parallelism: heads, channels and the vocabulary are sharded."""
    context: Axis = ALONE
    """Context parallelism: ranks hold contiguous parts of every row, in rank order."""
    attention: AttentionForm = "a2a"
    """Attention algorithm under context parallelism."""
    hyena_li: LongFilterForm = "states"
    """Modal Hyena-LI algorithm under context parallelism. (Free-form filters have no states and
    always use a2a.)"""
    delta: DeltaForm = "states"
    """Delta-rule algorithm under context parallelism."""
    experts: Axis = ALONE
    """Expert parallelism: ranks hold equally many experts, in rank order. The axis contains whole
    tensor axes."""
    row_parts: Axis = ALONE
    """context × tensor, if experts are sharded: ranks that hold slices of the same rows."""

    gathered: Axis = ALONE
    """After `share_rows`: the tensor axis, for the parts of the operator that it shards."""

    def share_rows(self) -> Axes:
        """Return axes for an operator that is not sharded over the tensor axis: both tensor and
        context axis divide its rows."""
        return replace(self, tensor=ALONE, context=self.row_parts, gathered=self.tensor)

    shared: Mapping[str, Holders] = field(default_factory=dict)
    """Holders by module path, for modules on several pipeline stages: tied embeddings, shared
    blocks."""

    def holders(self, parameter: str) -> Holders:
        """Return the ranks that hold a parameter."""
        for path, holders in self.shared.items():
            if parameter.startswith(f"{path}."):
                return holders
        return Holders(replicated=self.tensor if self.tensor.size > 1 else ALONE)
