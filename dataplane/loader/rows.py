"""Rows: the tokens of the stream's rows, with the documents in them and their loss weights.

A row reads L + 1 tokens: L inputs, and the same shifted by one as targets. A target that is the
first token of another document is masked: nothing before it says what it will be.

Rows are read in two goes: views of all of them are gathered, each of its bytes checked, and then
copied by one call, which makes them as wide as a model wants them.
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
    """Where rows are written."""

    tokens: Int64
    """[n, L + 1]"""
    weights: Float32
    """[n, L]: what each target counts for in the loss."""

    @classmethod
    def empty(cls, rows: int, length: int) -> RowArrays:
        return cls(np.empty((rows, length + 1), np.int64), np.empty((rows, length), np.float32))


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows that were read."""

    located: Located
    arrays: RowArrays
    document_starts: Int64
    """Where documents begin in the rows laid side by side: place p of row n is n·L + p, and p is
    in [1, L]."""
    digests: list[bytes]
    """Of each row, if asked for: it names the row's tokens, targets included, as they are kept."""


class RowReader:
    """Reads the rows of a plan."""

    def __init__(
        self, plan: Plan, *, cache: Cache | None = None, stream: Stream | None = None
    ) -> None:
        """`stream` is the plan's, if it is at hand: making one takes a while for many sources."""
        self.plan = plan
        self.stream = stream or Stream(plan)
        self.cache = cache
        self._datasets: dict[int, Dataset] = {}
        self._opening = [threading.Lock() for _ in plan.sources]
        self._open_shards = OpenShards()

    def dataset(self, source: int) -> Dataset:
        with self._opening[source]:
            if source not in self._datasets:
                planned = self.plan.sources[source]
                self._datasets[source] = open_pinned(
                    planned.url,
                    hash=planned.dataset,
                    generations=planned.generations,
                    name=planned.name,
                    cache=self.cache,
                    open_shards=self._open_shards,
                )
        return self._datasets[source]

    def read(
        self, located: Located, into: RowArrays | None = None, *, digests: bool = True
    ) -> RowBlock:
        """Read rows that were located."""
        length = located.length
        arrays = into or RowArrays.empty(len(located.rows), length)
        weights = arrays.weights
        weights.fill(1.0)
        gathered, named = Gathered(), []
        places = zip(located.sources.tolist(), located.tokens.tolist(), strict=True)
        for number, (source, first) in enumerate(places):
            dataset = self._datasets.get(source) or self.dataset(source)
            before = len(gathered.tokens)
            dataset.gather(first, first + length + 1, number * length, gathered)
            if dataset.palette is not None:
                codes = dataset.codes(first + 1, first + length + 1)
                weights[number] = dataset.palette[np.concatenate(codes)]
            if digests:
                named.append(digest(gathered.tokens[before:]))
        copy_all(gathered.tokens, arrays.tokens.reshape(-1))
        starts = gathered.document_starts()
        if self.plan.isolate_documents:
            weights.reshape(-1)[starts - 1] = 0.0
        return RowBlock(located, arrays, starts, named)


def digest(parts: list[Tokens]) -> bytes:
    """Names tokens, however they are cut into parts."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part.data)
    return state.digest()
