"""A share: what one data-parallel rank reads, in groups of steps.

    step → its rows → this rank's

The rows of an update are the plan's; ranks share them out in order. Short steps are read several
at a time: what it costs to begin is then little for each.
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
"""As much as stays in a core's cache between being written and being read."""
TOKEN_BYTES = 12
"""An int64, and the weight of a target."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The rows of one rank in every step from `start_step` on."""

    plan: Plan
    rank: int
    world: int
    start_step: int
    digests: bool
    group_bytes: int
    """Of the arrays of a group, unless one step has more."""

    def shape(self, group: range) -> tuple[int, int]:
        """The rows of a group, and their length."""
        step = self.plan.step(group[0])
        first, last = self._part(step.rows)
        return len(group) * (last - first), step.phase.seq_len

    def rows(self, group: range) -> Int64:
        step = self.plan.step(group[0])
        firsts = step.first_row + step.rows * np.arange(len(group), dtype=np.int64)
        return (firsts[:, None] + np.arange(*self._part(step.rows))).reshape(-1)

    def groups(self, turn: int = 0, turns: int = 1) -> Iterator[range]:
        """All steps, in groups of one phase; or those of one of `turns` readers that take turns.
        The first are short, because somebody waits for them."""
        return islice(self._groups(), turn, None, turns)

    @property
    def most_bytes(self) -> int:
        """Of the arrays of any group."""
        return max(self.group_bytes, *(self._step_bytes(phase) for phase in self.plan.phases))

    def _groups(self) -> Iterator[range]:
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

    def _part(self, rows: int) -> tuple[int, int]:
        """Which of a step's rows are this rank's."""
        return rows * self.rank // self.world, rows * (self.rank + 1) // self.world


@dataclass(frozen=True, eq=False)
class Labels:
    """What is said of the rows of a group; all that is not as long as they are."""

    rows: Int64
    """The rows' numbers."""
    sources: npt.NDArray[np.int32]
    boundaries: Int64
    """Where documents begin in the rows laid side by side, and the end. Every row begins one."""
    digests: list[bytes]


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The rows of some steps, side by side."""

    steps: range
    arrays: RowArrays
    labels: Labels


class ShareReader:
    """Reads a share's groups in order, or those of one of several readers that take turns. What
    lies on object storage is fetched ahead."""

    def __init__(
        self, share: Share, cache: Cache | None = None, turn: int = 0, turns: int = 1
    ) -> None:
        self.share, self.turn, self.turns = share, turn, turns
        self._prefetcher = None
        if all(is_local(source.url) for source in share.plan.sources):
            self.reader = RowReader(share.plan, cache=cache)
        else:
            cache = cache or Cache()
            self.reader = RowReader(share.plan, cache=cache)
            self._prefetcher = Prefetcher(self.reader, cache, self._locate())
        self._located = self._locate()

    def read(self, group: range, into: RowArrays | None = None) -> RowGroup:
        rows, length = self.share.shape(group)
        arrays = into or RowArrays.empty(rows, length)
        located = next(self._located) if rows else Located.nowhere(length)
        block = self.reader.read(located, arrays, digests=self.share.digests)
        boundaries = np.arange(0, rows * length + 1, length)
        if self.share.plan.isolate_documents:
            starts = block.document_starts
            inside = starts[starts % length != 0]  # right after a row, one begins with the next
            boundaries = np.sort(np.concatenate([boundaries, inside]))
        if self._prefetcher and rows:
            self._prefetcher.done()
        labels = Labels(located.rows, located.sources, boundaries, block.digests)
        return RowGroup(group, arrays, labels)

    def close(self) -> None:
        if self._prefetcher:
            self._prefetcher.close()

    def _locate(self) -> Iterator[Located]:
        parts = map(self.share.rows, self.share.groups(self.turn, self.turns))
        return self.reader.stream.locate_each(part for part in parts if len(part))
