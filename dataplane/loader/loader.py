"""The loader: micro-batches for a data-parallel rank, step by step.

The plan decides a step's rows; a rank takes a contiguous range. The numbers of ranks, workers and
micro-batches decide who reads a row, never which rows a step has.

    step → rows → this rank's rows → micro-batches with `micro_batch` rows, padded to that size

A thread reads groups of steps ahead (read_ahead.py). A process would import numpy, compute the
order, and map chunks a second time, at the CPU cost of reading 100 MB.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import numpy as np

from ...console.errors import ConfigError, ConfigProblem
from ..arrays import Int64
from ..datasets.cache import Cache
from ..order.plan import Plan
from ..order.stream import Stream
from .batch import Batch, Batcher
from .rank_rows import GROUP_BYTES, LoadedGroup, RankReader, RankRows
from .read_ahead import read_ahead


class Loader:
    """Iterates over the plan's steps from `start_step` on. An item is a list of micro-batches, as
    many on all ranks. A context rank gets contiguous columns of every row.

    A thread reads up to `workers` groups of rows ahead while the caller computes; 0 reads within
    the step. Read errors are raised at the step that needs the rows, a thread's own fault at the
    next step. `pin_memory` copies batches into pinned memory, and `digests` hashes rows for the
    ledger.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        micro_batch: int,
        rank: int = 0,
        world: int = 1,
        context_rank: int = 0,
        context_size: int = 1,
        start_step: int | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        digests: bool = True,
        cache: Cache | None = None,
        group_bytes: int = GROUP_BYTES,
        stream: Stream | None = None,
    ) -> None:
        """Steps are read in groups whose arrays take about `group_bytes`. Pass the plan's `stream`
        if it exists."""
        problems = []
        if not 0 <= rank < world or micro_batch < 1 or workers < 0:
            problem = (
                f"rank {rank} of {world}, {micro_batch} rows a micro-batch, {workers} workers: "
                "ranks count from 0, and a micro-batch has a row or more"
            )
            problems.append(ConfigProblem("", problem))
        if start_step is not None and not plan.first_step <= start_step <= plan.end_step:
            problem = f"step {start_step} is not in the plan, whose steps are {plan.first_step} to "
            problems.append(ConfigProblem("", f"{problem}{plan.end_step - 1}"))
        if not 0 <= context_rank < context_size:
            problems.append(ConfigProblem("", f"context rank {context_rank} of {context_size}"))
        problems += [
            ConfigProblem(
                f"phases.{phase.name}.seq_len",
                f"{phase.seq_len:,} tokens cannot be cut into {context_size} equal parts",
            )
            for phase in plan.phases
            if phase.seq_len % context_size
        ]
        problems += [
            ConfigProblem("", f"rows of {length:,} tokens cannot be cut into {context_size} parts")
            for length in sorted({length for length in plan.lengths if length % context_size})
        ]
        if pin_memory and not _has_cuda():
            problems.append(ConfigProblem("pin_memory", "no CUDA device was found"))
        if problems:
            raise ConfigError("the loader", problems)
        first_step = plan.first_step if start_step is None else start_step
        self.rank_rows = RankRows(
            plan=plan,
            rank=rank,
            world=world,
            start_step=first_step,
            digests=digests,
            group_bytes=group_bytes,
        )
        self.batcher = Batcher(
            micro_batch, context_rank=context_rank, context_size=context_size, pin=pin_memory
        )
        self.workers = workers
        self.cache = cache
        self.stream = stream

    @property
    def steps(self) -> range:
        return range(self.rank_rows.start_step, self.rank_rows.plan.end_step)

    def __iter__(self) -> Generator[list[Batch]]:
        with closing(RankReader(self.rank_rows, self.cache, self.stream)) as reader:
            for steps in read_ahead(map(self._steps, reader.groups()), self.workers):
                yield from steps

    def _steps(self, group: LoadedGroup) -> list[list[Batch]]:
        """Split a group into steps of micro-batches; all ranks get equal numbers."""
        phase, num_rows = group.step_group.phase, len(group.step_group.share)
        max_rows = -(-phase.batch_rows // self.rank_rows.world)
        micro_batch = self.batcher.micro_batch
        starts = np.arange(0, max_rows, micro_batch)
        step_ranges = np.minimum([starts, starts + micro_batch], num_rows)
        # row_ranges, bounds [steps, 2, micro-batches]
        row_ranges = step_ranges + num_rows * np.arange(len(group.step_group.steps))[:, None, None]
        labels, ends = group.labels, row_ranges * phase.seq_len
        documents = boundaries = _split(labels.documents, ends)
        if labels.boundaries is not labels.documents:
            boundaries = _split(labels.boundaries, ends)
        return [
            [
                self.batcher.make_batch(group, slice(*rows), *starts)
                for rows, *starts in zip(step_rows.T.tolist(), *step_starts, strict=True)
            ]
            for step_rows, *step_starts in zip(row_ranges, documents, boundaries, strict=True)
        ]


def _split(starts: Int64, ends: Int64) -> list[list[Int64]]:
    """Select the starts of each micro-batch's tokens, with the end: [steps][micro-batches]. `ends`
    are the first token and the end of each, [steps, 2, micro-batches]."""
    bounds = starts.searchsorted(ends)
    return [
        [starts[first : last + 1] for first, last in step_bounds.T.tolist()]
        for step_bounds in bounds
    ]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
