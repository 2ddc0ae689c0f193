"""The loader: micro-batches for a data-parallel rank, step by step.

The plan decides a step's rows; a rank takes a contiguous range. The numbers of ranks, workers and
micro-batches decide who reads a row, never which rows a step has.

    step → rows → this rank's rows → micro-batches with `micro_batch` rows, padded to that size

A thread reads groups of steps ahead (read_ahead.py). A process would import numpy, compute the
order, and map chunks a second time, at the CPU cost of reading 100 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...console.errors import ConfigError, ConfigProblem
from ..arrays import Int64
from ..datasets.cache import Cache
from ..order.plan import Plan
from .rank_rows import GROUP_BYTES, LoadedGroup, RankReader, RankRows
from .read_ahead import read_ahead

if TYPE_CHECKING:
    import torch

PADDING = -1
ToTensor = Callable[[npt.NDArray[Any]], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch: B rows with L tokens."""

    tokens: torch.Tensor
    """int64 [B, L]; with context parallelism [B, L / N], this rank's columns."""
    targets: torch.Tensor
    """int64, shape as `tokens`."""
    weights: torch.Tensor
    """float32, shape as `tokens`; 0 for masked targets and in padding rows."""
    cu_seqlens: torch.Tensor
    """int32 [documents + 1] Document starts in the B·L tokens laid side by side, then B·L. Covers
    whole rows on every context rank, because documents cross the cuts."""
    documents: Int64
    """[documents + 1] As `cu_seqlens`, also where documents are not isolated."""
    rows: Int64
    """Row numbers in the stream; PADDING in padding rows."""
    sources: npt.NDArray[np.int32]
    """Indices into the plan's sources."""
    digests: list[bytes]
    """16 bytes per row, in order, without padding rows."""
    columns: slice
    """The columns in [0, L) that this context rank holds."""

    @property
    def positions(self) -> torch.Tensor:
        """int32, shape as `tokens`: position in the document's fragment in this row."""
        import torch

        bounds = self.cu_seqlens.numpy()
        places = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds))
        return torch.from_numpy(places).view(len(self.tokens), -1)[:, self.columns]


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
    ) -> None:
        """Steps are read in groups whose arrays take about `group_bytes`."""
        problems = []
        if not 0 <= rank < world or micro_batch < 1 or workers < 0:
            problem = f"rank {rank} of {world}, {micro_batch} rows a micro-batch, {workers} workers"
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
        self.micro_batch = micro_batch
        self.context_rank, self.context_size = context_rank, context_size
        self.workers = workers
        self.pin_memory = pin_memory
        self.cache = cache

    @property
    def steps(self) -> range:
        return range(self.rank_rows.start_step, self.rank_rows.plan.end_step)

    def __iter__(self) -> Iterator[list[Batch]]:
        with closing(RankReader(self.rank_rows, self.cache)) as reader:
            for steps in read_ahead(map(self._steps, reader.groups()), self.workers):
                yield from steps

    def _steps(self, group: LoadedGroup) -> list[list[Batch]]:
        """Split a group into steps of micro-batches; all ranks get equal numbers."""
        import torch

        tensor = _pinned if self.pin_memory else torch.from_numpy
        phase, num_rows = group.step_group.phase, len(group.step_group.share)
        max_rows = -(-phase.batch_rows // self.rank_rows.world)
        starts = np.arange(0, max_rows, self.micro_batch)
        step_ranges = np.minimum([starts, starts + self.micro_batch], num_rows)
        # row_ranges, bounds [steps, 2, micro-batches]
        row_ranges = step_ranges + num_rows * np.arange(len(group.step_group.steps))[:, None, None]
        labels, ends = group.labels, row_ranges * phase.seq_len
        documents = boundaries = _split(labels.documents, ends)
        if labels.boundaries is not labels.documents:
            boundaries = _split(labels.boundaries, ends)
        return [
            [
                self._batch(group, slice(*rows), tensor, *starts)
                for rows, *starts in zip(step_rows.T.tolist(), *step_starts, strict=True)
            ]
            for step_rows, *step_starts in zip(row_ranges, documents, boundaries, strict=True)
        ]

    def _batch(
        self,
        group: LoadedGroup,
        row_slice: slice,
        tensor: ToTensor,
        documents: Int64,
        boundaries: Int64,
    ) -> Batch:
        """Return rows from a group as a micro-batch, padded to `micro_batch` rows. `documents` and
        `boundaries` are the rows' part of the group's labels."""
        labels = group.labels
        rows, sources = labels.rows[row_slice], labels.sources[row_slice]
        tokens, weights = group.arrays.tokens[row_slice], group.arrays.weights[row_slice]
        length = group.step_group.phase.seq_len
        first_token = row_slice.start * length
        documents, boundaries = documents - first_token, boundaries - first_token
        num_padding = self.micro_batch - len(rows)
        if num_padding:
            ends = np.arange(len(rows) + 1, self.micro_batch + 1) * length
            documents, boundaries = (
                np.concatenate([starts, ends]) for starts in (documents, boundaries)
            )
            rows, sources = (
                _append_padding(rows, num_padding, PADDING),
                _append_padding(sources, num_padding, 0),
            )
            tokens, weights = (
                _append_padding(tokens, num_padding, 0),
                _append_padding(weights, num_padding, 0),
            )
        columns = slice(
            self.context_rank * length // self.context_size,
            (self.context_rank + 1) * length // self.context_size,
        )
        return Batch(
            tokens=tensor(tokens[:, columns]),
            targets=tensor(tokens[:, columns.start + 1 : columns.stop + 1]),
            weights=tensor(weights[:, columns]),
            cu_seqlens=tensor(boundaries.astype(np.int32)),
            documents=documents,
            rows=rows,
            sources=sources,
            digests=labels.digests[row_slice],
            columns=columns,
        )


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


def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(array)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _append_padding(values: npt.NDArray[Any], num_rows: int, padding: int) -> npt.NDArray[Any]:
    """Return the array with padding rows appended."""
    return np.concatenate([values, np.full((num_rows, *values.shape[1:]), padding, values.dtype)])
