"""The rows of one data-parallel rank, read in groups of steps.

    step → its rows → this rank's rows

The plan decides the rows of a step; each rank takes a contiguous range of them. Short steps are
read several at a time, to spread the fixed cost of a read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from ..datasets.cache import Cache
from ..order.plan import Phase, Plan
from ..order.stream import Located
from ..storage.storage import is_local
from .prefetch import Prefetcher
from .rows import RowArrays, RowReader

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

    def shape(self, group: range) -> tuple[int, int]:
        """Return the number of rows of a group, and their length."""
        step = self.plan.step(group[0])
        first, last = self._range(step.rows)
        return len(group) * (last - first), step.phase.seq_len

    def rows(self, group: range) -> Int64:
        step = self.plan.step(group[0])
        firsts = step.first_row + step.rows * np.arange(len(group), dtype=np.int64)
        return (firsts[:, None] + np.arange(*self._range(step.rows))).reshape(-1)

    def groups(self) -> Iterator[range]:
        """Yield all steps in groups, each within one phase. The first groups are short, so that
        training starts early."""
        limit = 1
        for phase in self.plan.phases:
            first, last = max(phase.first_step, self.start_step), phase.last_step
            fit = max(1, self.group_bytes // max(1, self._step_bytes(phase)))
            while first < last:
                yield range(first, min(first + min(limit, fit), last))
                first += min(limit, fit)
                limit = min(2 * limit, fit)

    def _step_bytes(self, phase: Phase) -> int:
        rows, length = self.shape(range(phase.first_step, phase.first_step + 1))
        return rows * (length + 1) * TOKEN_BYTES

    def _range(self, rows: int) -> tuple[int, int]:
        """Return the range of this rank among the rows of a step."""
        return rows * self.rank // self.world, rows * (self.rank + 1) // self.world


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
    """The rows of consecutive steps."""

    steps: range
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
        self._local_sources: set[int] = set()

    def groups(self) -> Iterator[RowGroup]:
        """Read the groups in order."""
        blocks, filled = self._locate(), 0
        for group in self.rank_rows.groups():
            rows, length = self.rank_rows.shape(group)
            located = next(blocks) if rows else Located.empty(length)
            if self._prefetcher is None and self._reads_remote(located):
                self._prefetcher = Prefetcher(self.reader, self.cache, self._locate(filled))
            yield self._read(group, located)
            filled += rows > 0

    def _read(self, group: range, located: Located) -> RowGroup:
        block = self.reader.read(located, digests=self.rank_rows.digests)
        rows, length = block.arrays.weights.shape
        boundaries = np.arange(0, rows * length + 1, length)
        if self.rank_rows.plan.isolate_documents:
            starts = block.document_starts
            inside = starts[starts % length != 0]  # place L of a row is place 0 of the next
            boundaries = np.sort(np.concatenate([boundaries, inside]))
        if rows and self._prefetcher:
            self._prefetcher.done()
        labels = Labels(located.rows, located.sources, boundaries, block.digests)
        return RowGroup(group, block.arrays, labels)

    def close(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()

    def _reads_remote(self, located: Located) -> bool:
        """True if rows lie in a remote dataset. The URL of a source may not say so: the tokens of a
        local view can be in a store."""
        fresh = set(located.sources.tolist()) - self._local_sources
        sources = self.rank_rows.plan.sources
        if not all(is_local(sources[source].url) for source in fresh):
            return True
        if not all(is_local(self.reader.dataset(source).shards_url) for source in fresh):
            return True
        self._local_sources |= fresh
        return False

    def _locate(self, first: int = 0) -> Iterator[Located]:
        """Locate the rows of each group that has any, from the group `first` of these on."""
        filled = (group for group in self.rank_rows.groups() if self.rank_rows.shape(group)[0])
        return self.reader.stream.locate_blocks(
            map(self.rank_rows.rows, islice(filled, first, None))
        )
