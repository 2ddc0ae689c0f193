"""The loader: for each update, the micro-batches of one data-parallel rank.

The rows of an update are the plan's; ranks share them out in order. How many ranks, workers or
micro-batches there are changes who reads a row, never which rows an update has.

    step → its rows → this rank's slice → micro-batches of `micro_batch` rows, padded to that size

With workers, processes read whole steps ahead into shared memory. They hold nothing by name, so
that whatever is killed leaves nothing behind.
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
from .rows import Float32, RowArrays, RowReader
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
class RankRows:
    """One rank's rows of a step, the arrays padded to whole micro-batches."""

    tokens: Int64
    weights: Float32
    rows: Int64
    sources: npt.NDArray[np.int32]
    document_starts: Int64
    """Where documents begin in the rows laid side by side (see RowBlock)."""
    digests: list[bytes]


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
        ahead = Prefetcher(
            reader.stream, cache, steps, lambda step: self.slice(self.plan.step(step))
        )

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
        rows = self.slice(step)
        padded = self.micro_batch_count(step) * self.micro_batch
        arrays = into or RowArrays.empty(padded, step.phase.seq_len)
        tokens, weights = arrays.tokens[:padded], arrays.weights[:padded]
        tokens[len(rows) :] = 0
        weights[len(rows) :] = 0.0
        if not len(rows):  # more ranks than rows
            return RankRows(tokens, weights, rows, np.empty(0, np.int32), np.empty(0, np.int64), [])
        block = reader.read(rows, arrays)
        sources = block.located.sources
        digests = [
            reader.digest(source, row)
            for source, row in zip(sources.tolist(), block.tokens, strict=True)
            if self.digests
        ]
        return RankRows(tokens, weights, rows, sources, block.document_starts, digests)

    def micro_batches(self, read: RankRows) -> list[Batch]:
        """Cut a rank's rows into micro-batches."""
        import torch

        size = self.micro_batch
        length = read.weights.shape[1] // self.context_size
        part = slice(self.context_rank * length, (self.context_rank + 1) * length)
        ahead = slice(part.start + 1, part.stop + 1)
        tensor = self._pinned if self.pin_memory else torch.from_numpy
        batches = []
        for first in range(0, len(read.tokens), size):
            last = first + size
            tokens = read.tokens[first:last]
            batches.append(
                Batch(
                    tokens=tensor(tokens[:, part]),
                    targets=tensor(tokens[:, ahead]),
                    weights=tensor(read.weights[first:last, part]),
                    cu_seqlens=torch.from_numpy(self._boundaries(read, first)),
                    rows=_padded(read.rows[first:last], size, PADDING),
                    sources=_padded(read.sources[first:last], size, 0),
                    digests=read.digests[first:last],
                    part=part,
                )
            )
        return batches

    @staticmethod
    def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(array).contiguous().pin_memory()

    def _boundaries(self, read: RankRows, first: int) -> npt.NDArray[np.int32]:
        """Where documents begin in the micro-batch of row `first`: every row begins one, too."""
        length, rows = read.weights.shape[1], self.micro_batch
        edges = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
        if not self.plan.isolate_documents:
            return edges
        starts = read.document_starts
        if len(read.tokens) > rows:
            begin = first * length
            starts = starts[starts.searchsorted(begin) : starts.searchsorted(begin + edges[-1])]
            starts = starts - begin
        both = np.concatenate([edges, starts.astype(np.int32)])
        both.sort()
        # A document that begins right after a row begins with the next one.
        distinct: npt.NDArray[np.int32] = both[np.append(both[1:] != both[:-1], True)]
        return distinct


def _padded(values: npt.NDArray[Any], size: int, padding: int) -> npt.NDArray[Any]:
    missing = size - len(values)
    if not missing:
        return values
    return np.concatenate([values, np.full(missing, padding, values.dtype)])
