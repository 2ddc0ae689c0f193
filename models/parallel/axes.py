"""Along which axes a model is divided, and where on each this process stands."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """One axis of a layout: the processes along it, and this one's place among them."""

    group: ProcessGroup | None
    rank: int
    size: int


ALONE = Axis(None, 0, 1)
"""An axis that divides nothing."""


@dataclass(frozen=True)
class Axes:
    """What divides a model itself. (Data parallelism divides the batch, which no model sees.)"""

    tensor: Axis = ALONE
    """Heads, channels and the vocabulary are divided."""
    context: Axis = ALONE
    """Rows are divided: each process has a part of every sequence."""
