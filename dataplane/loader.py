"""The loader: for each update, the micro-batches of one data-parallel rank.

The rows of an update are the plan's; ranks share them out in order. How many ranks, workers or
micro-batches there are changes who reads a row, never which rows an update has.

    step → its rows → this rank's slice → micro-batches of `micro_batch` rows, padded to that size

With workers, processes read whole steps ahead into shared memory, and what is handed on lies there
still. They hold nothing by name, so that whatever is killed leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..console.errors import ConfigError, Problem
from .cache import Cache
from .permutation import Int64
from .plan import Plan, Step
from .rows import RowArrays, RowReader
from .storage import is_local

if TYPE_CHECKING:
    import torch

PADDING = -1


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


@dataclass(frozen=True, eq=False)
class Labels:
    """What is said of one rank's rows of a step; all that is not as long as they are."""

    rows: Int64
    """The rows' numbers, padded to whole micro-batches."""
    sources: npt.NDArray[np.int32]
    cu_seqlens: list[npt.NDArray[np.int32]]
    """Of each micro-batch."""
    digests: list[bytes]


@dataclass(frozen=True, eq=False)
class RankRows:
    """One rank's rows of a step, padded to whole micro-batches."""

    arrays: RowArrays
    labels: Labels


ReadStep = Callable[..., RankRows]
"""Reads the step of a number, into arrays where some are given."""


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
        self.plan = plan
        self.micro_batch = micro_batch
        self.rank, self.world = rank, world
        self.context_rank, self.context_size = context_rank, context_size
        self.start_step = plan.first_step if start_step is None else start_step
        self.workers = workers
        self.pin_memory = pin_memory
        self.digests = digests
        self.cache = cache

    def __iter__(self) -> Iterator[list[Batch]]:
        if self.workers:
            from .workers import read_ahead

            source = read_ahead(self)
        else:
            source = self._read_here()
        for rows in source:
            yield self.micro_batches(rows)

    def _read_here(self) -> Iterator[RankRows]:
        with self.reading(self.steps) as read:
            for number in self.steps:
                yield read(number)

    @contextmanager
    def reading(self, steps: Iterable[int]) -> Iterator[ReadStep]:
        """A function that reads this rank's rows of `steps`, one after the other; what lies on
        object storage is fetched ahead of it."""
        if all(is_local(source.url) for source in self.plan.sources):
            reader = RowReader(self.plan, cache=self.cache)
            yield partial(self.read, reader)
            return
        from .prefetch import Prefetcher

        cache = self.cache or Cache()
        reader = RowReader(self.plan, cache=cache)
        ahead = Prefetcher(reader, cache, steps, lambda step: self.slice(self.plan.step(step)))

        def read(number: int, into: RowArrays | None = None) -> RankRows:
            rows = self.read(reader, number, into)
            ahead.done(number)
            return rows

        try:
            yield read
        finally:
            ahead.close()

    @property
    def steps(self) -> range:
        return range(self.start_step, self.plan.last_step)

    def slice(self, step: Step) -> Int64:
        """This rank's rows of a step."""
        first = step.first_row + step.rows * self.rank // self.world
        last = step.first_row + step.rows * (self.rank + 1) // self.world
        return np.arange(first, last, dtype=np.int64)

    def micro_batch_count(self, step: Step) -> int:
        """How many micro-batches every rank has in a step."""
        largest = -(-step.rows // self.world)
        return -(-largest // self.micro_batch)

    def read(self, reader: RowReader, number: int, into: RowArrays | None = None) -> RankRows:
        step = self.plan.step(number)
        rows, length = self.slice(step), step.phase.seq_len
        padded = self.micro_batch_count(step) * self.micro_batch
        arrays = into or RowArrays.empty(padded, length)
        arrays.tokens[len(rows) :] = 0
        arrays.weights[len(rows) :] = 0.0
        sources, starts, digests = np.empty(0, np.int32), np.empty(0, np.int64), []
        if len(rows):  # there may be more ranks than rows
            block = reader.read(rows, arrays)
            sources, starts = block.located.sources, block.document_starts
            if self.digests:
                pairs = zip(sources.tolist(), block.tokens, strict=True)
                digests = [reader.digest(source, row) for source, row in pairs]
        labels = Labels(
            rows=_padded(rows, padded, PADDING),
            sources=_padded(sources, padded, 0),
            cu_seqlens=self._boundaries(starts, padded, length),
            digests=digests,
        )
        return RankRows(arrays, labels)

    def micro_batches(self, read: RankRows) -> list[Batch]:
        """Cut a rank's rows into micro-batches."""
        import torch

        arrays, labels, size = read.arrays, read.labels, self.micro_batch
        length = arrays.weights.shape[1] // self.context_size
        part = slice(self.context_rank * length, (self.context_rank + 1) * length)
        ahead = slice(part.start + 1, part.stop + 1)
        tensor = _pinned if self.pin_memory else torch.from_numpy
        batches = []
        for number, bounds in enumerate(labels.cu_seqlens):
            these = slice(number * size, (number + 1) * size)
            tokens = arrays.tokens[these]
            batches.append(
                Batch(
                    tokens=tensor(tokens[:, part]),
                    targets=tensor(tokens[:, ahead]),
                    weights=tensor(arrays.weights[these, part]),
                    cu_seqlens=torch.from_numpy(bounds),
                    rows=labels.rows[these],
                    sources=labels.sources[these],
                    digests=labels.digests[these],
                    part=part,
                )
            )
        return batches

    def _boundaries(self, starts: Int64, rows: int, length: int) -> list[npt.NDArray[np.int32]]:
        """For each micro-batch where documents begin, and its end. Every row begins one, too."""
        size = self.micro_batch * length
        edges = np.arange(0, size + 1, length, dtype=np.int32)
        if not self.plan.isolate_documents:
            return [edges] * (rows // self.micro_batch)
        inside = starts[starts % length != 0]  # right after a row, one begins with the next
        found = []
        for first in range(0, rows * length, size):
            low, high = inside.searchsorted((first, first + size))
            bounds = np.concatenate([edges, (inside[low:high] - first).astype(np.int32)])
            bounds.sort()
            found.append(bounds)
        return found


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(array)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _padded(values: npt.NDArray[Any], size: int, padding: int) -> npt.NDArray[Any]:
    missing = size - len(values)
    if not missing:
        return values
    return np.concatenate([values, np.full(missing, padding, values.dtype)])
