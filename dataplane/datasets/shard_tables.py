"""The shards of a dataset, read from its mapped shard tables when they are asked for.

The chunk hashes of a shard take 8 KB for 64 MB of tokens, so a table is mapped, not loaded: the
processes of a host share its bytes, and only shards that are open have their hashes in memory. Of
the token counts, one sum for each block of shards is kept. A table that has changed since it was
mapped is verified again, like a shard.
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
from .manifest import Generation, Shard, shard_of

BLOCK = 128
"""Shards of a block."""
TABLE_READERS = 16
"""Shard tables read in parallel: on an object store each is a request."""


class ShardTables:
    """The shards of some generations of a dataset, in order. Thread-safe."""

    def __init__(self, url: str, generations: Sequence[Generation]) -> None:
        def table(generation: Generation) -> NamedFile:
            return NamedFile(url, generation.table)

        if len(generations) == 1:  # a thread costs memory, and there may be thousands of datasets
            self._tables = [table(generations[0])]
        else:
            with ThreadPoolExecutor(TABLE_READERS) as pool:
                self._tables = list(pool.map(table, generations))
        self._firsts = [0, *accumulate(generation.shards for generation in generations)]
        """Shards before each table, then the total."""
        self.blocks = integers(self.sums("tokens")[:-1:BLOCK])
        """Tokens before each block of shards."""

    def __len__(self) -> int:
        return self._firsts[-1]

    def __iter__(self) -> Iterator[Shard]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Shard:
        ((table, row, _),) = self._parts(number, number + 1)
        with _reading(table):
            return shard_of(_rows(table).slice(row, 1).to_pylist()[0])

    def sums(self, name: str) -> Int64:
        """Return the sums of a column (`tokens`, `documents`) before each shard, then the total."""
        return self._sums(name, 0, len(self))

    def block_tokens(self, block: int) -> array[int]:
        """Return the tokens before each shard of a block, and after the last one."""
        first = block * BLOCK
        sums = self._sums("tokens", first, min(first + BLOCK, len(self)))
        return integers(self.blocks[block] + sums)

    def _sums(self, name: str, first: int, last: int) -> Int64:
        parts = []
        for table, row, count in self._parts(first, last):
            with _reading(table):
                # `to_numpy` would import pandas, which takes 25 MiB.
                chunks = _rows(table).column(name).slice(row, count).chunks
                parts += [np.from_dlpack(chunk) for chunk in chunks]
        return np.cumsum(np.concatenate([[0], *parts]), dtype=np.int64)

    def _parts(self, first: int, last: int) -> Iterator[tuple[NamedFile, int, int]]:
        """Yield the parts of the tables that hold the shards [first, last): a table, its first row
        of them, and their number."""
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"shards {first} to {last} of {len(self)}")
        while first < last:
            number = bisect_right(self._firsts, first) - 1
            count = min(last, self._firsts[number + 1]) - first
            yield self._tables[number], first - self._firsts[number], count
            first += count


def _rows(table: NamedFile) -> Any:
    """Return a table that is mapped; its columns are views. A table that has changed is verified
    first."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.py_buffer(table.data)).read_all()


@contextmanager
def _reading(table: NamedFile) -> Iterator[None]:
    """Name a table that is written while it is read: it was whole just before."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise IntegrityError(
            f"{table.where} changed while it was read ({type(error).__name__})", hint=table.hint
        ) from None


def integers(values: Int64) -> array[int]:
    """Return numbers as an array that Python indexes several times faster than numpy's."""
    return array("q", values.tobytes())
