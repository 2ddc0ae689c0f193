"""Rows: the tokens of the stream's rows, their documents and their loss weights.

A row reads L + 1 tokens: L inputs, and the same shifted by one as targets. A target that is the
first token of another document is masked: no input of its document precedes it.

A row of several spans (order/epochs) reads them one after another, and the token after the last.
The next span begins like a document, and its first token is always a masked target.

Rows are read in two steps: views of all of them are gathered, and their bytes verified; then one
call copies them, widening ids to int64.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens
from ..datasets.cache import Cache
from ..datasets.dataset import Dataset, Gathered, copy_all, open_pinned
from ..datasets.open_shard import OpenShards
from ..order.plan import Plan
from ..order.stream import Located, Stream
from ..runlog.ledger import DIGEST_BYTES

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RowArrays:
    """Arrays that rows are written into."""

    tokens: Int64
    """[n, L + 1]"""
    weights: Float32
    """[n, L]: loss weight of each target."""

    @classmethod
    def empty(cls, rows: int, length: int) -> RowArrays:
        return cls(np.empty((rows, length + 1), np.int64), np.empty((rows, length), np.float32))


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows, read."""

    located: Located
    arrays: RowArrays
    document_starts: Int64
    """Starts of documents and of further spans in the rows laid side by side: place p of row n is
    n·L + p, with p in [1, L]."""
    digests: list[bytes]
    """Digest of each row's stored tokens, the last target included; empty if not requested."""


class RowReader:
    """Reads the rows of a plan."""

    def __init__(
        self, plan: Plan, *, cache: Cache | None = None, stream: Stream | None = None
    ) -> None:
        """Pass the plan's `stream` if it exists: for many sources it takes time to compute."""
        self.plan = plan
        self.stream = stream or Stream(plan)
        self.cache = cache
        self.opened: dict[int, Dataset] = {}
        """By the index of the source."""
        self._opening = [threading.Lock() for _ in plan.sources]
        self._open_shards = OpenShards()

    def dataset(self, source: int) -> Dataset:
        with self._opening[source]:
            if source not in self.opened:
                planned = self.plan.sources[source]
                self.opened[source] = open_pinned(
                    planned.url,
                    hash=planned.dataset,
                    generations=planned.generations,
                    name=planned.name,
                    cache=self.cache,
                    open_shards=self._open_shards,
                )
        return self.opened[source]

    def read(
        self, located: Located, into: RowArrays | None = None, *, digests: bool = True
    ) -> RowBlock:
        """Read rows at their locations."""
        length = located.length
        arrays = into or RowArrays.empty(len(located.rows), length)
        weights = arrays.weights
        weights.fill(1.0)
        gathered, row_digests, pieces = Gathered(), [], located.pieces
        places = zip(located.sources.tolist(), located.tokens.tolist(), strict=True)
        for number, (source, first) in enumerate(places):
            dataset = self.opened.get(source) or self.dataset(source)
            before = len(gathered.tokens)
            if number in pieces:
                self._gather_joined(dataset, located, number, gathered)
            else:
                dataset.gather(first, first + length + 1, number * length, gathered)
            table = dataset.weight_table
            if table is not None:
                codes = [
                    view
                    for start, end in located.spans(number)
                    for view in dataset.codes(start + 1, end + 1)
                ]
                row = codes[0] if len(codes) == 1 else np.concatenate(codes)
                # Most rows have code 0 alone; the look-up of each token costs more than the rest.
                weights[number] = table[row] if row.any() else table[0]
            if digests:
                row_digests.append(digest(gathered.tokens[before:]))
        copy_all(gathered.tokens, arrays.tokens.reshape(-1))
        starts = gathered.document_starts()
        masked = starts if self.plan.isolate_documents else np.array(gathered.joints, np.int64)
        weights.reshape(-1)[masked - 1] = 0.0
        return RowBlock(located, arrays, starts, row_digests)

    def _gather_joined(
        self, dataset: Dataset, located: Located, number: int, into: Gathered
    ) -> None:
        """Add a row of several spans."""
        place = number * located.length
        *others, last = located.spans(number)
        for start, end in (*others, (last[0], last[1] + 1)):
            if place > number * located.length:
                into.joints.append(place)
            dataset.gather(start, end, place, into)
            place += end - start


def digest(parts: list[Tokens]) -> bytes:
    """Return the digest of tokens, independent of how they are split into parts."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part.data)
    return state.digest()
