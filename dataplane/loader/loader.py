"""The loader: for each update, the micro-batches of one data-parallel rank.

The rows of an update are the plan's; ranks share them out in order. How many ranks, workers or
micro-batches there are changes who reads a row, never which rows an update has.

    step → its rows → this rank's slice → micro-batches of `micro_batch` rows, padded to that size

With workers, processes read whole steps ahead into shared memory, and what is handed on lies there
still. They hold nothing by name, so that whatever is killed leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...console.errors import ConfigError, Problem
from ..arrays import Int64
from ..datasets.cache import Cache
from ..order.plan import Plan
from .rank_rows import GROUP_BYTES, RowGroup, Share, ShareReader
from .workers import SENT_BYTES, read_ahead

if TYPE_CHECKING:
    import torch

PADDING = -1
ToTensor = Callable[[npt.NDArray[Any]], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch: `B` rows of `L` tokens."""

    tokens: torch.Tensor
    """int64 [B, L], or this context rank's part of it, [B, L / N]"""
    targets: torch.Tensor
    """int64, as tokens"""
    weights: torch.Tensor
    """float32, as tokens; 0 where a target is masked and in rows of padding."""
    cu_seqlens: torch.Tensor
    """int32: where documents begin in the B·L tokens laid side by side, and B·L at the end. Of
    whole rows, on every context rank: documents cross the cuts."""
    rows: Int64
    """The rows' numbers; PADDING where there is none."""
    sources: npt.NDArray[np.int32]
    """Indices into the plan's sources."""
    digests: list[bytes]
    """Of the real rows, in order."""
    part: slice
    """Which of a row's L places these are."""

    @property
    def positions(self) -> torch.Tensor:
        """int32, as tokens: each one's place in its document, or in the part of it in the row."""
        import torch

        bounds = self.cu_seqlens.numpy()
        places = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], np.diff(bounds))
        return torch.from_numpy(places).view(len(self.tokens), -1)[:, self.part]


class Loader:
    """Iterates over the plan's steps from `start_step` on; each is a list of micro-batches, as
    many on every rank. A context rank gets its part of every row: the parts side by side."""

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
    ) -> None:
        problems = []
        if not 0 <= rank < world or micro_batch < 1 or workers < 0:
            problem = f"rank {rank} of {world}, {micro_batch} rows a micro-batch, {workers} workers"
            problems.append(Problem("", problem))
        if start_step is not None and not plan.first_step <= start_step <= plan.last_step:
            problem = f"step {start_step} is not one of the plan's, {plan.first_step} to "
            problems.append(Problem("", f"{problem}{plan.last_step - 1}"))
        if not 0 <= context_rank < context_size:
            problems.append(Problem("", f"context rank {context_rank} of {context_size}"))
        problems += [
            Problem(
                f"phases.{phase.name}.seq_len",
                f"{phase.seq_len:,} tokens cannot be cut into {context_size} equal parts",
            )
            for phase in plan.phases
            if phase.seq_len % context_size
        ]
        if pin_memory and not _has_cuda():
            problems.append(Problem("pin_memory", "there is no CUDA device to pin memory for"))
        if problems:
            raise ConfigError("the loader", problems)
        first = plan.first_step if start_step is None else start_step
        self.share = Share(
            plan=plan,
            rank=rank,
            world=world,
            start_step=first,
            digests=digests,
            group_bytes=SENT_BYTES if workers else GROUP_BYTES,
        )
        self.micro_batch = micro_batch
        self.context_rank, self.context_size = context_rank, context_size
        self.workers = workers
        self.pin_memory = pin_memory
        self.cache = cache

    @property
    def steps(self) -> range:
        return range(self.share.start_step, self.share.plan.last_step)

    def __iter__(self) -> Iterator[list[Batch]]:
        for group in self._groups():
            yield from self._steps(group)

    def _groups(self) -> Iterator[RowGroup]:
        if self.workers:
            yield from read_ahead(self.share, self.workers, self.cache)
            return
        with closing(ShareReader(self.share, self.cache)) as reader:
            for group in self.share.groups():
                yield reader.read(group)

    def _steps(self, group: RowGroup) -> Iterator[list[Batch]]:
        """Cut a group into steps, and those into micro-batches: as many on every rank."""
        import torch

        share, size = self.share, self.micro_batch
        tensor = _pinned if self.pin_memory else torch.from_numpy
        most = -(-share.plan.step(group.steps[0]).rows // share.world)
        rows = len(group.labels.rows) // len(group.steps)
        for number in range(len(group.steps)):
            first, last = number * rows, (number + 1) * rows
            yield [
                self._batch(group, begin, min(begin + size, last), tensor)
                for begin in range(first, first + most, size)
            ]

    def _batch(self, group: RowGroup, first: int, last: int, tensor: ToTensor) -> Batch:
        """The rows [first, last) of a group, and padding if they are too few."""
        labels, these = group.labels, slice(first, last)
        rows, sources = labels.rows[these], labels.sources[these]
        tokens, weights = group.arrays.tokens[these], group.arrays.weights[these]
        length = weights.shape[1]
        begin, end = first * length, last * length
        low, high = labels.boundaries.searchsorted((begin, end))
        bounds = labels.boundaries[low : high + 1] - begin
        missing = self.micro_batch - len(rows)
        if missing:
            ends = np.arange(len(rows) + 1, self.micro_batch + 1) * length
            bounds = np.concatenate([bounds, ends])
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
            cu_seqlens=tensor(bounds.astype(np.int32)),
            rows=rows,
            sources=sources,
            digests=labels.digests[these],
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
    """An array with so many rows of padding behind it."""
    return np.concatenate([values, np.full((missing, *values.shape[1:]), padding, values.dtype)])
