"""The loader: the micro-batches of one data-parallel rank, step by step.

The plan decides the rows of a step; each rank takes a contiguous range of them. The numbers of
ranks, workers and micro-batches decide who reads a row, never which rows a step has.

    step → its rows → this rank's rows → micro-batches of `micro_batch` rows, padded to that size

A thread reads groups of steps ahead (read_ahead.py). A process that did so would import numpy, walk
the order, and map chunks once more: that takes as much CPU time as reading 100 MB.
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
from .rank_rows import GROUP_BYTES, RankReader, RankRows, RowGroup
from .read_ahead import read_ahead

if TYPE_CHECKING:
    import torch

PADDING = -1
ToTensor = Callable[[npt.NDArray[Any]], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch: `B` rows of `L` tokens."""

    tokens: torch.Tensor
    """int64 [B, L]; with context parallelism [B, L / N], this rank's part of each row."""
    targets: torch.Tensor
    """int64, shape of `tokens`."""
    weights: torch.Tensor
    """float32, shape of `tokens`; 0 for masked targets and in padding rows."""
    cu_seqlens: torch.Tensor
    """int32: document starts in the B·L tokens laid side by side, then B·L. Covers whole rows on
    every context rank, because documents cross the cuts."""
    rows: Int64
    """Row numbers in the stream; PADDING in padding rows."""
    sources: npt.NDArray[np.int32]
    """Indices into the plan's sources."""
    digests: list[bytes]
    """16 bytes for each row that is not padding, in order."""
    part: slice
    """The places of a row that this context rank has, of L."""

    @property
    def positions(self) -> torch.Tensor:
        """int32, shape of `tokens`: each token's position in its document's fragment in the row."""
        import torch

        bounds = self.cu_seqlens.numpy()
        places = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds))
        return torch.from_numpy(places).view(len(self.tokens), -1)[:, self.part]


class Loader:
    """Iterates over the plan's steps from `start_step` on. Each item is a list of micro-batches;
    the number is equal on all ranks. A context rank gets a contiguous part of every row.

    A thread reads up to `workers` groups of rows ahead while the caller computes; 0 reads within
    the step. Its errors are raised at the step that needs the rows. `pin_memory` copies batches
    into pinned memory, and `digests` hashes each row for the ledger.
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
        """Rows are read in groups of steps whose arrays take about `group_bytes`."""
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
        first = plan.first_step if start_step is None else start_step
        self.rank_rows = RankRows(
            plan=plan,
            rank=rank,
            world=world,
            start_step=first,
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

    def _steps(self, read: RowGroup) -> list[list[Batch]]:
        """Split a group into steps of micro-batches; all ranks get equal numbers."""
        import torch

        tensor = _pinned if self.pin_memory else torch.from_numpy
        phase, rows = read.group.phase, len(read.group.share)
        most = -(-phase.batch_rows // self.rank_rows.world)
        firsts = np.arange(0, most, self.micro_batch)
        inside = np.minimum([firsts, firsts + self.micro_batch], rows)
        ranges = inside + rows * np.arange(len(read.group.steps))[:, None, None]
        bounds = read.labels.boundaries.searchsorted(ranges * phase.seq_len)
        return [
            [
                self._batch(read, slice(*rows), slice(low, high + 1), tensor)
                for rows, (low, high) in zip(step.T.tolist(), places.T.tolist(), strict=True)
            ]
            for step, places in zip(ranges, bounds, strict=True)
        ]

    def _batch(self, read: RowGroup, chosen: slice, bounds: slice, tensor: ToTensor) -> Batch:
        """Return rows of a group as a micro-batch, padded to its size. `bounds` are those of its
        documents in the group's."""
        labels = read.labels
        rows, sources = labels.rows[chosen], labels.sources[chosen]
        tokens, weights = read.arrays.tokens[chosen], read.arrays.weights[chosen]
        length = read.group.phase.seq_len
        starts = labels.boundaries[bounds] - chosen.start * length
        missing = self.micro_batch - len(rows)
        if missing:
            ends = np.arange(len(rows) + 1, self.micro_batch + 1) * length
            starts = np.concatenate([starts, ends])
            rows, sources = _padded(rows, missing, PADDING), _padded(sources, missing, 0)
            tokens, weights = _padded(tokens, missing, 0), _padded(weights, missing, 0)
        part = slice(
            self.context_rank * length // self.context_size,
            (self.context_rank + 1) * length // self.context_size,
        )
        return Batch(
            tokens=tensor(tokens[:, part]),
            targets=tensor(tokens[:, part.start + 1 : part.stop + 1]),
            weights=tensor(weights[:, part]),
            cu_seqlens=tensor(starts.astype(np.int32)),
            rows=rows,
            sources=sources,
            digests=labels.digests[chosen],
            part=part,
        )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(array)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _padded(values: npt.NDArray[Any], missing: int, padding: int) -> npt.NDArray[Any]:
    """Return the array with `missing` rows of padding appended."""
    return np.concatenate([values, np.full((missing, *values.shape[1:]), padding, values.dtype)])
