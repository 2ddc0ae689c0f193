"""The rows of one data-parallel rank, read in groups of steps.

    step → its rows → this rank's rows

The plan decides the rows of a step; each rank takes a contiguous range of them. Short steps are
read several at a time, to spread the fixed cost of a read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from ..datasets.cache import Cache
from ..order.plan import Phase, Plan
from ..order.stream import RowLocations
from .prefetch import Prefetcher
from .rows import FoundRows, RowArrays, RowReader

GROUP_BYTES = 2 << 20
"""Bytes of the arrays of a group: they stay in a core's cache from their write to their read."""
TOKEN_BYTES = 12
"""Bytes per token: an int64 id and the float32 weight of a target."""


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """The rows of one rank in every step from `start_step` on."""

    plan: Plan
    rank: int
    world: int
    start_step: int
    digests: bool
    group_bytes: int
    """Bytes of the arrays of a group; more only if a single step has more."""

    def groups(self) -> Iterator[Group]:
        """Yield all steps in groups, each within one phase. The first groups are short, so that
        training starts early."""
        limit = 1
        for phase in self.plan.phases:
            share = range(
                phase.batch_rows * self.rank // self.world,
                phase.batch_rows * (self.rank + 1) // self.world,
            )
            fit = max(1, self.group_bytes // max(1, len(share) * (phase.seq_len + 1) * TOKEN_BYTES))
            first, last = max(phase.first_step, self.start_step), phase.end_step
            while first < last:
                count = min(limit, fit, last - first)
                yield Group(phase, range(first, first + count), share)
                first += count
                limit = min(2 * limit, fit)


@dataclass(frozen=True)
class Group:
    """Consecutive steps of a phase, of which a rank reads its rows together."""

    phase: Phase
    steps: range
    share: range
    """This rank's rows among those of a step."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.steps) * len(self.share)

    def rows(self) -> Int64:
        """Return the numbers of the rows in the stream."""
        phase = self.phase
        steps = np.arange(self.steps.start, self.steps.stop, dtype=np.int64) - phase.first_step
        firsts = phase.first_row + steps * phase.batch_rows + self.share.start
        return (firsts[:, None] + np.arange(len(self.share))).reshape(-1)


@dataclass(frozen=True, eq=False)
class Labels:
    """Per-row metadata of a group (no [rows, length] arrays)."""

    rows: Int64
    """Row numbers in the stream."""
    sources: npt.NDArray[np.int32]
    boundaries: Int64
    """Document starts in the rows laid side by side, then the end. Every row starts a document."""
    digests: list[bytes]


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The rows of a group, read."""

    group: Group
    arrays: RowArrays
    labels: Labels


class RankReader:
    """Reads the groups of a rank. From the first group with a row in a remote dataset on, remote
    shards are prefetched."""

    def __init__(self, rank_rows: RankRows, cache: Cache | None = None) -> None:
        self.rank_rows = rank_rows
        self.cache = cache or Cache()
        self.reader = RowReader(rank_rows.plan, cache=self.cache)
        self._prefetcher: Prefetcher | None = None

    def groups(self) -> Iterator[RowGroup]:
        """Read the groups in order."""
        blocks: Iterator[FoundRows] = self.reader.find_blocks(
            group.rows() for group in self.rank_rows.groups() if len(group)
        )
        for group in self.rank_rows.groups():
            if not len(group):
                found = self.reader.find(RowLocations.empty(group.phase.seq_len))
            else:
                found = next(blocks)
                if self._prefetcher is None and self.reader.is_remote(found.located):
                    blocks = self._prefetcher = Prefetcher(chain([found], blocks), self.cache)
                    found = next(blocks)
            yield self._read(group, found)

    def _read(self, group: Group, found: FoundRows) -> RowGroup:
        block = self.reader.read(found, digests=self.rank_rows.digests)
        rows, length = block.arrays.weights.shape
        boundaries = np.arange(0, rows * length + 1, length)
        if self.rank_rows.plan.isolate_documents:
            starts = block.document_starts
            inside = starts[starts % length != 0]  # place L of a row is place 0 of the next
            boundaries = np.sort(np.concatenate([boundaries, inside]))
        if rows and self._prefetcher:
            self._prefetcher.done()
        located = found.located
        labels = Labels(located.rows, located.sources, boundaries, block.digests)
        return RowGroup(group, block.arrays, labels)

    def close(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()
