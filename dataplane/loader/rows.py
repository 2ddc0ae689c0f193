"""Rows: the tokens of the stream's rows, their documents and their loss weights.

A row reads L + 1 tokens: L inputs, and the same shifted by one as targets. A target that is the
first token of another document is masked: no input of its document precedes it.

A row of several spans (order/epochs) reads them one after another, and the token after the last.
The next span begins like a document, and its first token is always a masked target.

Rows are found first, which needs no token. Then they are read in two steps: their bytes are
verified and gathered as they are stored; and one call widens all ids to int64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..arrays import Int64
from ..datasets.cache import Cache
from ..datasets.dataset import Dataset, open_pinned
from ..datasets.open_shard import OpenShards
from ..order.plan import Plan
from ..order.stream import RowLocations, Stream
from ..storage.storage import is_local
from .buffers import Buffers
from .gather import RowPieces, Spread, find
from .row_weights import Float32
from .together import together


@dataclass(frozen=True, eq=False)
class RowArrays:
    """Arrays that rows are written into."""

    tokens: Int64
    """[n, L + 1]"""
    weights: Float32
    """[n, L]: loss weight of each target."""

    @classmethod
    def of(cls, rows: int, length: int, buffers: Buffers) -> RowArrays:
        """Return arrays in memory of `buffers`; their values are undefined."""
        tokens, weights = rows * (length + 1) * 8, rows * length * 4
        memory = buffers.take(tokens + weights)
        return cls(
            memory[:tokens].view(np.int64).reshape(rows, length + 1),
            memory[tokens:].view(np.float32).reshape(rows, length),
        )


@dataclass(frozen=True, eq=False)
class FoundRows:
    """Rows whose bytes were found, and not yet read."""

    located: RowLocations
    pieces: RowPieces
    """Those of all rows that were located together with these."""


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows, read."""

    located: RowLocations
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
        self._buffers = Buffers()
        self._local_sources: set[int] = set()

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

    def is_remote(self, located: RowLocations) -> bool:
        """True if rows lie in a remote dataset. The URL of a source may not say so: the tokens of a
        local view can be in a store."""
        fresh = set(located.sources.tolist()) - self._local_sources
        if not all(is_local(self.plan.sources[source].url) for source in fresh):
            return True
        if not all(is_local(self.dataset(source).shards_url) for source in fresh):
            return True
        self._local_sources |= fresh
        return False

    def find_blocks(self, blocks: Iterable[Int64]) -> Iterator[FoundRows]:
        """Find blocks of rows, each of one length; many rows are found by one call."""
        found: FoundRows | None = None
        for located in self.stream.locate_blocks(blocks):
            if found is None or located.batch is not found.located.batch:
                found = self.find(located)
            yield FoundRows(located, found.pieces)

    def find(self, located: RowLocations) -> FoundRows:
        """Find the pieces of all rows that were located together with these; opens their datasets
        and shards, those in a store many at a time, because each takes several requests."""
        whole = located.batch or located
        remote = self.is_remote(whole)
        if remote:
            sources = np.unique(whole.sources).tolist()
            together(self.dataset, [source for source in sources if source not in self.opened])
        spread = Spread.of(whole, self.dataset)
        if remote:
            together(lambda shard: shard[0].open_shard(shard[1]), spread.closed_shards())
        return FoundRows(located, find(spread))

    def read(self, found: FoundRows, *, digests: bool = True) -> RowBlock:
        """Read rows that were found."""
        located, pieces = found.located, found.pieces
        length = located.length
        arrays = RowArrays.of(len(located.rows), length, self._buffers)
        width = length + 1
        first, last = located.first, located.first + len(located.rows)
        stored, weights = pieces.read(first, last)
        stored.widen(arrays.tokens)
        weights.write(arrays.weights)
        starts, joints = (
            places[slice(*places.searchsorted((first * width, last * width)))] - first * width
            for places in (pieces.documents, pieces.joints)
        )
        if len(joints):  # a document may begin there
            starts = np.union1d(starts, joints)
        masked = starts if self.plan.isolate_documents else joints
        masked, starts = (places - places // width for places in (masked, starts))
        arrays.weights.reshape(-1)[masked - 1] = 0.0
        return RowBlock(located, arrays, starts, stored.digests() if digests else [])
