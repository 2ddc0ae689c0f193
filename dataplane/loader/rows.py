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
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens
from ..datasets.cache import Cache
from ..datasets.dataset import Dataset, copy_all, open_pinned
from ..datasets.open_shard import OpenShards
from ..order.plan import Plan
from ..order.stream import Located, Stream
from ..runlog.ledger import DIGEST_BYTES
from .gather import RowPieces, find

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
        self._found: tuple[Located, RowPieces] | None = None
        """The last rows that were located together, and their pieces."""

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
        for source in np.unique(located.sources).tolist():
            self._weigh(located, source, weights)
        pieces, width = self._pieces(located), length + 1
        rows = (located.first + np.arange(len(located.rows) + 1)) * width
        bounds = pieces.places.searchsorted(rows).tolist()
        views = pieces.views(bounds[0], bounds[-1])
        copy_all(views, arrays.tokens.reshape(-1))
        starts, joints = (
            places[slice(*places.searchsorted(rows[[0, -1]]))] - rows[0]
            for places in (pieces.documents, pieces.joints)
        )
        if len(joints):  # a document may begin there
            starts = np.union1d(starts, joints)
        masked = starts if self.plan.isolate_documents else joints
        masked, starts = (places - places // width for places in (masked, starts))
        weights.reshape(-1)[masked - 1] = 0.0
        row_digests = []
        if digests:
            inside = [number - bounds[0] for number in bounds]
            row_digests = [digest(views[low:high]) for low, high in pairwise(inside)]
        return RowBlock(located, arrays, starts, row_digests)

    def _pieces(self, located: Located) -> RowPieces:
        """Return the pieces of all rows that were located together with these."""
        whole, found = self._found or (None, None)
        wanted = located.whole or located
        if found is None or whole is not wanted:
            found = find(wanted, self.dataset)
            self._found = wanted, found
        return found

    def _weigh(self, located: Located, source: int, weights: Float32) -> None:
        """Look up the weights of the targets of a source's rows."""
        dataset = self.dataset(source)
        table = dataset.weight_table
        if table is None:
            return
        for number in np.flatnonzero(located.sources == source).tolist():
            codes = [
                view
                for start, end in located.spans(number)
                for view in dataset.codes(start + 1, end + 1)
            ]
            row = codes[0] if len(codes) == 1 else np.concatenate(codes)
            # Most rows have code 0 alone; the look-up of each token costs more than the rest.
            weights[number] = table[row] if row.any() else table[0]


def digest(parts: list[Tokens]) -> bytes:
    """Return the digest of tokens, independent of how they are split into parts."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part.data)
    return state.digest()
