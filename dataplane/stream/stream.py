"""The stream for a training loop of your own: a mixture, a saved plan or a run, opened by its name.

from headrace.dataplane import Stream
dataset = Stream("mixture.yaml").dataset(micro_batch=4)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from ...console import commands
from ...console.errors import MissingError, PlanError
from ..datasets.cache import Cache
from ..order.plan import Plan

if TYPE_CHECKING:
    from .dataset import Names, StreamDataset

FRAMES = ("pandas", "polars")


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
        """Hash of the plan, which decides every row, with the decisions of a steered run."""
        return self.plan.hash

    @property
    def steps(self) -> range:
        """The plan's optimizer steps."""
        return range(self.plan.first_step, self.plan.end_step)

    def rows(
        self,
        first_row: int | None = None,
        end_row: int | None = None,
        frame: Literal["pandas", "polars"] | None = None,
    ) -> Any:
        """Return what the rows [first_row, end_row) hold, by default all, as a data frame: a line
        for each piece of a document, with its row, step, phase, source, number, id, file, epoch,
        and place in the document and the row. No token is read. A packed source counts
        the place in a piece of a document that it has cut.

        `frame`: pandas or polars; default: pandas, or if it is not installed, polars.
        """
        plan = self.plan
        first_row = plan.first_row if first_row is None else first_row
        end_row = plan.end_row if end_row is None else end_row
        if not plan.first_row <= first_row <= end_row <= plan.end_row:
            raise PlanError(
                f"the plan has rows {plan.first_row:,} to {plan.end_row:,}, not "
                f"{first_row:,}:{end_row:,}"
            )
        names = FRAMES if frame is None else (frame,)
        installed = next((name for name in names if find_spec(name)), None)
        if installed is None:
            raise MissingError(
                f"a data frame needs {' or '.join(names)}", hint=f"pip install {names[0]}"
            )
        table = commands.read_row_table(plan, range(first_row, end_row))
        if installed == "pandas":
            return table.to_pandas()
        return import_module("polars").from_arrow(table)

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
