"""Along which axes a model is divided, and where on each this process stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

AttentionForm = Literal["a2a", "ring"]
"""a2a: each process has whole rows of some heads. ring: keys and values go round."""
LongFilterForm = Literal["states", "a2a"]
"""states: what a part leaves behind goes on to the next. a2a: whole rows of some channels."""


@dataclass(frozen=True)
class Axis:
    """One axis of a layout: the processes along it, and this one's place among them."""

    group: ProcessGroup | None
    rank: int
    size: int

    def __reduce__(self) -> tuple[type[Axis], tuple[None, int, int]]:
        """Pickle rank and size: a process group has no meaning in another process."""
        return Axis, (None, self.rank, self.size)

    def share(self, number: int) -> range:
        """Which of so many things, dealt out in contiguous parts, are this process's."""
        return range(number * self.rank // self.size, number * (self.rank + 1) // self.size)

    def part(self, number: int) -> slice:
        """The same as a slice."""
        share = self.share(number)
        return slice(share.start, share.stop)

    def seats(self) -> list[Axis]:
        """The axis as each of its processes sees it."""
        return [replace(self, rank=rank) for rank in range(self.size)]

    @property
    def name(self) -> str:
        """What a custom op is told in place of the axis, which it cannot take; empty where nothing
        is divided."""
        return self.group.group_name if self.group is not None and self.size > 1 else ""


ALONE = Axis(None, 0, 1)
"""An axis that divides nothing."""


def named(name: str) -> Axis:
    """The axis of that name."""
    if not name:
        return ALONE
    group = c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return Axis(group, group.rank(), group.size())


@dataclass(frozen=True)
class Axes:
    """What divides a model itself. (Data parallelism divides the batch, which no model sees.)"""

    tensor: Axis = ALONE
    """Heads, channels and the vocabulary are divided."""
    context: Axis = ALONE
    """Rows are divided: each process has a part of every sequence, and the parts follow each
    other in the order of the ranks."""
    attention: AttentionForm = "a2a"
    """How attention sees a row that is divided."""
    hyena_li: LongFilterForm = "states"
    """How a modal filter does. (One of free form has no states, and always takes a2a.)"""
