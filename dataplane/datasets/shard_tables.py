"""A dataset's shards, read on demand from memory-mapped shard tables.

Chunk digests take 8 KB per 64 MB of tokens, so a table is mapped, not loaded: processes on a host
share the bytes, and only open shards have digests in memory. Token counts are kept as a sum per
block of shards. A table that has changed since it was mapped is verified again, like a shard.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np

from ...console.errors import IntegrityError
from ..arrays import Int64
from ..storage.verified import NamedFile
from .manifest import Generation, Shard, shard_from_row

BLOCK_SHARDS = 128
"""Shards per block."""
MAX_TABLE_READERS = 16
"""Tables read in parallel: on an object store, a request per table."""


class ShardTables:
    """The shards of a dataset's generations, in order. Thread-safe."""

    def __init__(self, url: str, generations: Sequence[Generation]) -> None:
        def table(generation: Generation) -> NamedFile:
            return NamedFile(url, generation.table)

        if len(generations) == 1:  # a thread costs memory, and there may be thousands of datasets
            self._tables = [table(generations[0])]
        else:
            with ThreadPoolExecutor(MAX_TABLE_READERS) as pool:
                self._tables = list(pool.map(table, generations))
        self._first_shards = [0, *accumulate(generation.shards for generation in generations)]
        """Shards before each table, then the total."""
        self.block_starts = compact_array(self.sums("tokens")[:-1:BLOCK_SHARDS])
        """Tokens before each block of shards."""

    def __len__(self) -> int:
        return self._first_shards[-1]

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Shard:
        ((table, row, _),) = self._table_slices(number, number + 1)
        with _name_changes(table):
            return shard_from_row(_open_table(table).slice(row, 1).to_pylist()[0])

    def sums(self, column: str) -> Int64:
        """Return a column's sums (`tokens`, `documents`) before each shard, then the total."""
        return self._sums(column, 0, len(self))

    def block_tokens(self, block: int) -> array[int]:
        """Return token offsets of a block's shards, then the end."""
        first = block * BLOCK_SHARDS
        sums = self._sums("tokens", first, min(first + BLOCK_SHARDS, len(self)))
        return compact_array(self.block_starts[block] + sums)

    def _sums(self, column: str, first: int, end: int) -> Int64:
        arrays = []
        for table, row, count in self._table_slices(first, end):
            with _name_changes(table):
                # `to_numpy` would import pandas, which takes 25 MiB.
                arrow_chunks = _open_table(table).column(column).slice(row, count).chunks
                arrays += [np.from_dlpack(chunk) for chunk in arrow_chunks]
        return np.cumsum(np.concatenate([[0], *arrays]), dtype=np.int64)

    def _table_slices(self, first: int, end: int) -> Iterator[tuple[NamedFile, int, int]]:
        """Yield the table slices that hold the shards [first, end): table, first row, rows."""
        if not 0 <= first <= end <= len(self):
            raise IndexError(f"shards {first} to {end} of {len(self)}")
        while first < end:
            number = bisect_right(self._first_shards, first) - 1
            count = min(end, self._first_shards[number + 1]) - first
            yield self._tables[number], first - self._first_shards[number], count
            first += count


def _open_table(table: NamedFile) -> Any:
    """Open a mapped table, whose columns are views. A changed table is verified first."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.py_buffer(table.data)).read_all()


@contextmanager
def _name_changes(table: NamedFile) -> Iterator[None]:
    """Turn read errors into an error that names the table: it was intact when it was opened."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise IntegrityError(
            f"{table.where} changed while it was read ({type(error).__name__})", hint=table.hint
        ) from None


def compact_array(values: Int64) -> array[int]:
    """Copy into an array that Python indexes several times faster than numpy's."""
    return array("q", values.tobytes())
