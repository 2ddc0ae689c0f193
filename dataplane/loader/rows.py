"""Rows: tokens, documents and loss weights.

A row reads L + 1 tokens: L inputs, and the same shifted by one as targets. A target that begins
another document is masked: no input from its document precedes it.

A row with several spans (order/epochs) reads them one after another, then the token after the last.
A further span begins like a document, and its first token is always a masked target.

Rows are found first, without reading tokens. Reading takes two steps: bytes are verified and
gathered as stored, then a single call widens all ids to int64.
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
from .buffers import BufferPool
from .gather import RowPieces, SplitRows, find_pieces
from .row_weights import Float32
from .together import run_parallel
from .unlearnt import mask_unlearnt, unlearnt_spans


@dataclass(frozen=True, eq=False)
class RowArrays:
    """Output arrays for rows."""

    tokens: Int64
    """[n, L + 1]"""
    weights: Float32
    """[n, L] Loss weights of targets."""

    @classmethod
    def allocate(cls, num_rows: int, length: int, buffers: BufferPool) -> RowArrays:
        """Return uninitialized arrays, in memory from `buffers`."""
        token_bytes, weight_bytes = num_rows * (length + 1) * 8, num_rows * length * 4
        memory = buffers.take(token_bytes + weight_bytes)
        return cls(
            memory[:token_bytes].view(np.int64).reshape(num_rows, length + 1),
            memory[token_bytes:].view(np.float32).reshape(num_rows, length),
        )


@dataclass(frozen=True, eq=False)
class PendingRows:
    """Rows whose bytes were found but not yet read."""

    located: RowLocations
    pieces: RowPieces
    """For all rows that were located together with these."""


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows that were read."""

    located: RowLocations
    arrays: RowArrays
    document_starts: Int64
    """Positions n·L + p, p in [1, L], where documents and further spans begin: place p in row n."""
    digests: list[bytes]
    """Per row, over the stored tokens, the last target included; empty if not requested."""


class RowReader:
    """Reads a plan's rows."""

    def __init__(
        self, plan: Plan, *, cache: Cache | None = None, stream: Stream | None = None
    ) -> None:
        """Pass the plan's `stream` if it exists: for many sources it takes long to compute."""
        self.plan = plan
        self.stream = stream or Stream(plan)
        self.cache = cache
        self.opened: dict[int, Dataset] = {}
        """Open datasets, by source index."""
        self.unlearnt = unlearnt_spans(plan.sources)
        self._opening = [threading.Lock() for _ in plan.sources]
        self._open_shards = OpenShards()
        self._buffers = BufferPool()
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
        """Return True if rows lie in a remote dataset. A source's URL may not tell: a local view's
        tokens can be in a store."""
        new_sources = set(located.sources.tolist()) - self._local_sources
        if not all(is_local(self.plan.sources[source].url) for source in new_sources):
            return True
        if not all(is_local(self.dataset(source).shards_url) for source in new_sources):
            return True
        self._local_sources |= new_sources
        return False

    def find_blocks(self, blocks: Iterable[Int64]) -> Iterator[PendingRows]:
        """Find blocks of rows, many rows per call. A block's rows have the same length."""
        pending: PendingRows | None = None
        for located in self.stream.locate_blocks(blocks):
            if pending is None or located.batch is not pending.located.batch:
                pending = self.find(located)
            yield PendingRows(located, pending.pieces)

    def find(self, located: RowLocations) -> PendingRows:
        """Find the pieces of these rows and of all rows located together with them. Opens datasets
        and shards, in parallel if they are remote: opening takes several requests."""
        batch = located.batch or located
        remote = self.is_remote(batch)
        if remote:
            sources = np.unique(batch.sources).tolist()
            run_parallel(self.dataset, [source for source in sources if source not in self.opened])
        split_rows = SplitRows.split(batch, self.dataset)
        if remote:
            run_parallel(lambda shard: shard[0].open_shard(shard[1]), split_rows.closed_shards())
        return PendingRows(located, find_pieces(split_rows))

    def read(self, pending: PendingRows, *, digests: bool = True) -> RowBlock:
        """Read and verify rows."""
        located, pieces = pending.located, pending.pieces
        length = located.length
        arrays = RowArrays.allocate(len(located.rows), length, self._buffers)
        first, end = located.first, located.first + len(located.rows)
        stored, weights = pieces.read(first, end)
        stored.widen(arrays.tokens)
        weights.write(arrays.weights)
        row_tokens = length + 1
        bounds = first * row_tokens, end * row_tokens
        starts, joints = (
            positions[slice(*positions.searchsorted(bounds))] - bounds[0]
            for positions in (pieces.document_starts, pieces.joints)
        )
        if len(joints):  # a document may begin there, too
            starts = np.union1d(starts, joints)
        masked = starts if self.plan.isolate_documents else joints
        masked, starts = (positions - positions // row_tokens for positions in (masked, starts))
        arrays.weights.reshape(-1)[masked - 1] = 0.0
        if self.unlearnt:
            mask_unlearnt(arrays.weights, located, self.unlearnt)
        return RowBlock(located, arrays, starts, stored.digests() if digests else [])
