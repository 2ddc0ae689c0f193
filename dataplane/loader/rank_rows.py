"""Rows of a data-parallel rank, read in groups of steps.

    step → rows → this rank's rows

The plan decides a step's rows; a rank takes a contiguous range. Short steps are read in groups, to
spread the fixed cost of reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, expand_ranges
from ..datasets.cache import Cache
from ..order.plan import Phase, Plan
from ..order.stream import RowLocations, Stream
from .prefetch import Prefetcher
from .rows import PendingRows, RowArrays, RowReader

GROUP_BYTES = 2 << 20
"""Array bytes per group: small enough to stay in a core's cache from write to read."""
TOKEN_ARRAY_BYTES = 12
"""Bytes per token: an int64 id and the float32 weight of a target."""


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """A rank's rows, in every step from `start_step` on."""

    plan: Plan
    rank: int
    world: int
    start_step: int
    digests: bool
    group_bytes: int
    """Array bytes per group, exceeded only by a single step."""

    def groups(self) -> Iterator[StepGroup]:
        """Yield all steps in groups. A group lies within a phase; the first groups are short, so
        that training starts early."""
        max_steps = 1
        for phase in self.plan.phases:
            share = range(
                phase.batch_rows * self.rank // self.world,
                phase.batch_rows * (self.rank + 1) // self.world,
            )
            max_fitting = max(
                1, self.group_bytes // max(1, len(share) * (phase.seq_len + 1) * TOKEN_ARRAY_BYTES)
            )
            first, end = max(phase.first_step, self.start_step), phase.end_step
            while first < end:
                num_steps = min(max_steps, max_fitting, end - first)
                yield StepGroup(phase, range(first, first + num_steps), share)
                first += num_steps
                max_steps = min(2 * max_steps, max_fitting)


@dataclass(frozen=True)
class StepGroup:
    """Consecutive steps in a phase, whose rows a rank reads together."""

    phase: Phase
    steps: range
    share: range
    """This rank's rows, counted within a step."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.steps) * len(self.share)

    def rows(self) -> Int64:
        """Return row numbers in the stream."""
        phase = self.phase
        steps = np.arange(self.steps.start, self.steps.stop, dtype=np.int64) - phase.first_step
        firsts = phase.first_row + steps * phase.batch_rows + self.share.start
        return (firsts[:, None] + np.arange(len(self.share))).reshape(-1)


@dataclass(frozen=True, eq=False)
class GroupLabels:
    """Metadata per row in a group (no [rows, length] arrays)."""

    rows: Int64
    """Row numbers in the stream."""
    sources: npt.NDArray[np.int32]
    documents: Int64
    """Document starts in the rows laid side by side, then the end. Every row starts a document."""
    boundaries: Int64
    """Starts of what operators keep apart, then the end: documents, or rows if documents are not
    isolated."""
    digests: list[bytes]
    model_lengths: Int64
    """Tokens of the model's rows, into which a row is cut."""


@dataclass(frozen=True, eq=False)
class LoadedGroup:
    """A group whose rows were read."""

    step_group: StepGroup
    arrays: RowArrays
    labels: GroupLabels


class RankReader:
    """Reads a rank's groups. Prefetching starts at the first group with rows in a remote
    dataset."""

    def __init__(
        self, rank_rows: RankRows, cache: Cache | None = None, stream: Stream | None = None
    ) -> None:
        self.rank_rows = rank_rows
        self.cache = cache or Cache()
        self.reader = RowReader(rank_rows.plan, cache=self.cache, stream=stream)
        self._prefetcher: Prefetcher | None = None

    def groups(self) -> Iterator[LoadedGroup]:
        """Read the groups in order."""
        blocks: Iterator[PendingRows] = self.reader.find_blocks(
            group.rows() for group in self.rank_rows.groups() if len(group)
        )
        for group in self.rank_rows.groups():
            if not len(group):
                pending = self.reader.find(RowLocations.empty(group.phase.seq_len))
            else:
                pending = next(blocks)
                if self._prefetcher is None and self.reader.is_remote(pending.located):
                    blocks = self._prefetcher = Prefetcher(chain([pending], blocks), self.cache)
                    pending = next(blocks)
            yield self._read(group, pending)

    def _read(self, group: StepGroup, pending: PendingRows) -> LoadedGroup:
        block = self.reader.read(pending, digests=self.rank_rows.digests)
        rows, length = block.arrays.weights.shape
        model_lengths = self._model_lengths(pending.located)
        boundaries = np.append(row_starts(model_lengths, length), rows * length)
        starts = block.document_starts
        document_starts = starts[starts % length != 0]  # place L of a row is place 0 of the next
        documents = np.concatenate([boundaries, document_starts])
        documents = np.unique(documents) if self.rank_rows.plan.lengths else np.sort(documents)
        if self.rank_rows.plan.isolate_documents:
            boundaries = documents
        if rows and self._prefetcher:
            self._prefetcher.finish_block()
        located = pending.located
        labels = GroupLabels(
            located.rows, located.sources, documents, boundaries, block.digests, model_lengths
        )
        return LoadedGroup(group, block.arrays, labels)

    def _model_lengths(self, located: RowLocations) -> Int64:
        lengths = np.full(len(located.rows), located.length, np.int64)
        if self.rank_rows.plan.lengths:
            source_lengths = np.array(self.rank_rows.plan.lengths)[located.sources]
            return np.where(source_lengths, source_lengths, lengths)
        return lengths

    def close(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()


def row_starts(model_lengths: Int64, length: int) -> Int64:
    """Return where the model's rows start, in rows of `length` tokens laid side by side."""
    counts = length // model_lengths
    rows, numbers = expand_ranges(np.zeros_like(counts), counts)
    starts: Int64 = rows * length + numbers * model_lengths[rows]
    return starts
