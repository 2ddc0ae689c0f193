"""The stream for a training loop of your own: a mixture, a saved plan or a run, opened by its name.

from headrace.dataplane import Stream
dataset = Stream("mixture.yaml").dataset(micro_batch=4)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ...console import commands
from ..datasets.cache import Cache
from ..order.plan import Plan

if TYPE_CHECKING:
    from .dataset import Names, StreamDataset


class Stream:
    """The rows of a plan, in its order."""

    def __init__(
        self, source: str | os.PathLike[str] | Plan, overrides: Sequence[str] = ()
    ) -> None:
        """`source`: a mixture YAML, a saved plan, a run's folder, at a path or URL; or a `Plan`.
        `overrides`: `dotted.path=value` texts for a mixture."""
        if isinstance(source, Plan):
            self.plan = source
        else:
            self.plan = commands.open_plan(os.fspath(source), overrides)

    @cached_property
    def hash(self) -> str:
        """Hash of the plan, which decides every row."""
        return self.plan.hash

    @property
    def steps(self) -> range:
        """The plan's optimizer steps."""
        return range(self.plan.first_step, self.plan.end_step)

    def dataset(
        self,
        rank: int | None = None,
        world: int | None = None,
        *,
        micro_batch: int = 1,
        names: Names = "headrace",
        cache: Cache | None = None,
    ) -> StreamDataset:
        """Return a data-parallel rank's micro-batches as a torch dataset, for
        `DataLoader(dataset, batch_size=None)`.

        Default of `rank` and `world`: those of this process in torch.distributed, else 0 of 1.
        """
        from torch import distributed

        from .dataset import StreamDataset

        if (rank is None) != (world is None):
            raise TypeError("give both rank and world, or neither")
        if rank is None or world is None:
            is_distributed = distributed.is_available() and distributed.is_initialized()
            rank, world = (
                (distributed.get_rank(), distributed.get_world_size()) if is_distributed else (0, 1)
            )
        return StreamDataset(
            self.plan, micro_batch=micro_batch, rank=rank, world=world, names=names, cache=cache
        )
