"""Rows: the tokens of the stream's rows, with the documents in them and their loss weights.

A row reads L + 1 tokens: L inputs, and the same shifted by one as targets. A target that is the
first token of another document is masked: nothing before it says what it will be.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cache import Cache
from .dataset import Dataset, open_pinned
from .permutation import Int64
from .plan import Plan
from .stream import Located, Stream

Float32 = npt.NDArray[np.float32]
DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class RowArrays:
    """Where rows are written: arrays of n rows, which may be longer than what is asked for."""

    tokens: Int64
    """[n, L + 1]"""
    weights: Float32
    """[n, L]: what each target counts for in the loss."""

    @classmethod
    def empty(cls, rows: int, length: int) -> RowArrays:
        return cls(np.zeros((rows, length + 1), np.int64), np.zeros((rows, length), np.float32))


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows that were read."""

    located: Located
    tokens: Int64
    weights: Float32
    document_starts: list[Int64]
    """For each row, the places in (0, L] where a document begins."""


class RowReader:
    """Reads the rows of a plan."""

    def __init__(self, plan: Plan, *, cache: Cache | None = None) -> None:
        self.plan = plan
        self.stream = Stream(plan)
        self.cache = cache
        self._datasets: dict[int, Dataset] = {}

    def dataset(self, source: int) -> Dataset:
        if source not in self._datasets:
            planned = self.plan.sources[source]
            self._datasets[source] = open_pinned(
                planned.url,
                hash=planned.dataset,
                generations=planned.generations,
                name=planned.name,
                cache=self.cache,
            )
        return self._datasets[source]

    def read(self, rows: Int64, into: RowArrays | None = None) -> RowBlock:
        """Read rows, all of one length."""
        located = self.stream.locate(rows)
        length = located.length
        arrays = into or RowArrays.empty(len(rows), length)
        tokens = arrays.tokens[: len(rows)]
        weights = arrays.weights[: len(rows)]
        weights.fill(1.0)
        places = zip(located.sources.tolist(), located.tokens.tolist(), strict=True)
        starts = [
            self._read_one(self.dataset(source), first, tokens[number], weights[number])
            for number, (source, first) in enumerate(places)
        ]
        return RowBlock(located, tokens, weights, starts)

    def digest(self, source: int, tokens: Int64) -> bytes:
        """Names a row's tokens (targets included), whatever holds them."""
        narrow = tokens.astype(self.dataset(source).manifest.dtype)
        return hashlib.blake2b(narrow.data, digest_size=DIGEST_BYTES).digest()

    def _read_one(self, dataset: Dataset, first: int, tokens: Int64, weights: Float32) -> Int64:
        if dataset.palette is None:
            dataset.fill(first, tokens)
        else:
            codes = np.empty(len(tokens), np.uint8)
            dataset.fill(first, tokens, codes)
            weights[:] = dataset.palette[codes[1:]]
        starts = dataset.document_starts(first + 1, first + len(tokens)) - first
        if self.plan.isolate_documents:
            weights[starts - 1] = 0.0
        return starts
