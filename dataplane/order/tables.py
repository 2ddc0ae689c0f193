"""The source of every row, as tables that repeat.

All tables lie in a few flat arrays, so that a file can hold them and processes can map it
(kept_tables.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Int64

Array = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Repeat:
    """Rows [first, first + rows) repeat `table`."""

    first: int
    rows: int
    table: Array
    rank: Array
    """Earlier entries with the same source, by entry."""
    before: Int64
    """Rows before `first`, by source."""
    per_table: Int64
    """Rows in one table, by source."""


@dataclass(frozen=True, eq=False)
class Tables:
    """All repeats of an assignment, as arrays."""

    firsts: Int64
    rows: Int64
    bounds: Int64
    """Repeat i has the entries [bounds[i], bounds[i + 1]) of `table` and `rank`."""
    table: Array
    rank: Array
    before: Int64
    """[repeats, sources]"""
    per_table: Int64
    """[repeats, sources]"""

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, number: int) -> Repeat:
        entries = slice(int(self.bounds[number]), int(self.bounds[number + 1]))
        return Repeat(
            first=int(self.firsts[number]),
            rows=int(self.rows[number]),
            table=self.table[entries],
            rank=self.rank[entries],
            before=self.before[number],
            per_table=self.per_table[number],
        )

    @property
    def arrays(self) -> dict[str, Array]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class TablesBuilder:
    """Appends tables, and counts rows by source."""

    def __init__(self, num_sources: int) -> None:
        self.num_sources = num_sources
        self.counts = np.zeros(num_sources, np.int64)
        """Rows so far, by source."""
        self._rows: list[int] = []
        self._tables: list[Array] = []
        self._ranks: list[Array] = []
        self._before: list[Int64] = []
        self._per_table: list[Int64] = []

    def append(self, sources: Sequence[int], rows: int) -> None:
        """Append rows that repeat the table `sources`."""
        if not sources:
            return
        table: Array = np.array(sources, np.uint16 if self.num_sources <= 1 << 16 else np.uint32)
        per_table = np.bincount(table, minlength=self.num_sources)
        self._rows.append(rows)
        self._tables.append(table)
        self._ranks.append(rank_entries(table, self.num_sources).astype(np.uint32))
        self._before.append(self.counts)
        self._per_table.append(per_table.astype(np.int64))
        self.counts = self.counts + rows // len(table) * per_table

    def finish(self) -> Tables:
        lengths = [len(table) for table in self._tables]
        return Tables(
            firsts=np.cumsum([0, *self._rows[:-1]], dtype=np.int64),
            rows=np.array(self._rows, np.int64),
            bounds=np.cumsum([0, *lengths], dtype=np.int64),
            table=np.concatenate(self._tables),
            rank=np.concatenate(self._ranks),
            before=np.stack(self._before),
            per_table=np.stack(self._per_table),
        )


def rank_entries(table: Array, num_sources: int) -> Int64:
    """Count, by entry, the earlier entries with the same source."""
    order = np.argsort(table, kind="stable")
    counts = np.bincount(table, minlength=num_sources)
    ranks = np.empty(len(table), np.int64)
    ranks[order] = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks
