"""The tables of an assignment: the source of every row, as tables that repeat.

Rows [first, first + rows) of a repeat go through its table again and again. All tables are kept in
a few flat arrays, so that a file can hold them and processes can map it (kept_tables.py).
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
    """rank[r] counts the entries of table[r]'s source before r in the table."""
    before: Int64
    """Rows of each source before `first`."""
    per_table: Int64
    """Rows of each source in one table."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The repeats of an assignment, as arrays over all of them."""

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
        part = slice(int(self.bounds[number]), int(self.bounds[number + 1]))
        return Repeat(
            first=int(self.firsts[number]),
            rows=int(self.rows[number]),
            table=self.table[part],
            rank=self.rank[part],
            before=self.before[number],
            per_table=self.per_table[number],
        )

    @property
    def arrays(self) -> dict[str, Array]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class TablesBuilder:
    """Appends tables, and counts the rows of each source."""

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self.counts = np.zeros(sources, np.int64)
        """Rows of each source so far."""
        self._rows: list[int] = []
        self._tables: list[Array] = []
        self._ranks: list[Array] = []
        self._before: list[Int64] = []
        self._per_table: list[Int64] = []

    def append(self, sources: Sequence[int], rows: int) -> None:
        """Append rows that repeat the table `sources`."""
        if not sources:
            return
        table: Array = np.array(sources, np.uint16 if self.sources <= 1 << 16 else np.uint32)
        per_table = np.bincount(table, minlength=self.sources)
        self._rows.append(rows)
        self._tables.append(table)
        self._ranks.append(ranks_of(table, self.sources).astype(np.uint32))
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


def ranks_of(table: Array, sources: int) -> Int64:
    """Return for each entry the number of earlier entries with the same source."""
    order = np.argsort(table, kind="stable")
    counts = np.bincount(table, minlength=sources)
    ranks = np.empty(len(table), np.int64)
    ranks[order] = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks
