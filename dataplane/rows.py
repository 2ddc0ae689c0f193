"""Rows: the tokens of the stream's rows, with the documents in them and their loss weights.

A row reads L + 1 tokens: L inputs, and the same shifted by one as targets. A target that is the
first token of another document is masked: nothing before it says what it will be.
"""

from __future__ import annotations

import hashlib
import threading
from copy import copy
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
AHEAD = 2048
"""Rows that are located at once: the arithmetic costs little more for many than for one."""


@dataclass(frozen=True, eq=False)
class RowArrays:
    """Where rows are written: arrays of n rows, which may be longer than what is asked for."""

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
    tokens: Int64
    weights: Float32
    document_starts: Int64
    """Where documents begin in the rows laid side by side: place p of row n is n·L + p, and p is
    in [1, L]."""


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
        self._ahead = self.stream.locate(np.array([plan.first_row]))
        self._ahead_first = plan.first_row

    def twin(self) -> RowReader:
        """A reader for another thread; what one has opened is open for both."""
        return copy(self)

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
                )
        return self._datasets[source]

    def read(self, rows: Int64, into: RowArrays | None = None) -> RowBlock:
        """Read rows, side by side and all of one length."""
        located = self.locate(rows)
        arrays = into or RowArrays.empty(len(rows), located.length)
        tokens = arrays.tokens[: len(rows)]
        weights = arrays.weights[: len(rows)]
        weights.fill(1.0)
        places = zip(located.sources.tolist(), located.tokens.tolist(), strict=True)
        starts = []
        for number, (source, first) in enumerate(places):
            dataset = self._datasets.get(source) or self.dataset(source)
            place = number * located.length
            if dataset.palette is None:
                starts.append(dataset.row(first, tokens[number], None, place))
            else:
                codes = np.empty(located.length + 1, np.uint8)
                starts.append(dataset.row(first, tokens[number], codes, place))
                weights[number] = dataset.palette[codes[1:]]
        begins = np.concatenate(starts)
        if self.plan.isolate_documents:
            weights.reshape(-1)[begins - 1] = 0.0
        return RowBlock(located, tokens, weights, begins)

    def locate(self, rows: Int64) -> Located:
        """Where rows that lie side by side have their tokens."""
        assert rows[-1] - rows[0] == len(rows) - 1, "rows that do not lie side by side"
        first, count = int(rows[0]), len(rows)
        begin = first - self._ahead_first
        if begin < 0 or begin + count > len(self._ahead.rows):
            phase = self.plan.phase_at(first)
            last = max(first + count, min(first + AHEAD, phase.last_row))
            self._ahead = self.stream.locate(np.arange(first, last, dtype=np.int64))
            self._ahead_first, begin = first, 0
        ahead, part = self._ahead, slice(begin, begin + count)
        return Located(
            rows, ahead.length, ahead.sources[part], ahead.epochs[part], ahead.tokens[part]
        )

    def digest(self, source: int, tokens: Int64) -> bytes:
        """Names a row's tokens (targets included), whatever holds them."""
        narrow = tokens.astype(self.dataset(source).manifest.dtype)
        return hashlib.blake2b(narrow.data, digest_size=DIGEST_BYTES).digest()
