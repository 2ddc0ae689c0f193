"""Open shards: their layout in memory, and views of their tokens."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from ...console.errors import IntegrityError
from ..arrays import Bytes, Tokens
from ..shards import shard_format
from ..shards.documents import DocumentOrigin
from ..shards.format import PADDING, ShardLayout
from .manifest import Manifest, Shard
from .shard_file import ShardFile
from .view import Selection

MAX_OPEN_SHARDS = 512
"""Open shards per reader. A shard costs its document offsets and a file descriptor, and the usual
limit is 1,024 descriptors per process."""
MAX_BLOCKS = 2048
"""Shard blocks whose token counts a reader keeps: about 2 MB."""

MAX_GAP = 64
"""Origins whose document numbers differ by at most this are read by one call."""

T = TypeVar("T")


class OpenShard:
    """A shard with its layout in memory."""

    def __init__(
        self,
        number: int,
        file: ShardFile,
        shard: Shard,
        manifest: Manifest,
        padding: Padding,
        selection: Selection | None = None,
    ) -> None:
        """Open a shard, or a view's selection from it."""
        self.selection = selection
        self.number = number
        self.file = file
        self.shard = shard
        self.format = shard_format(manifest.format)
        self.dtype = manifest.token_type
        self.layout: ShardLayout = self.format.layout(
            self._read, shard.size, dtype=manifest.dtype, details=shard.details
        )
        if selection is not None:
            self.layout = selection.select_layout(self.layout, self.dtype.itemsize)
        self._width = self.dtype.itemsize
        # Python indexes a memoryview several times faster than a numpy array.
        self._run_tokens = np.ascontiguousarray(self.layout.run_tokens).data
        self._run_bytes = np.ascontiguousarray(self.layout.run_bytes).data
        self.padding = padding
        starts = self.layout.document_starts
        if starts[-1] != shard.tokens or len(starts) != shard.documents + 1:
            raise IntegrityError(
                f"{shard.name} holds {int(starts[-1])} tokens in {len(starts) - 1} documents; its "
                f"manifest says {shard.tokens} in {shard.documents}"
            )
        if shard.tokens < 1 << 31:  # almost always: half the memory
            narrow: Any = starts.astype(np.int32)
            self.layout = replace(self.layout, document_starts=narrow)

    def tokens(self, start: int, end: int) -> list[Tokens]:
        """Return the tokens [start, end), as views in order."""
        width, views = self._width, []
        run = bisect_right(self._run_tokens, start) - 1
        while start < end:
            run_end = min(end, self._run_tokens[run + 1])
            run_byte = self._run_bytes[run]
            if run_byte == PADDING:
                views.append(self.padding.tokens(run_end - start))
            else:
                byte = run_byte + (start - self._run_tokens[run]) * width
                views.append(
                    self.file.read(byte, byte + (run_end - start) * width).view(self.dtype)
                )
            start, run = run_end, run + 1
        return views

    def codes(self, start: int, end: int) -> list[Bytes]:
        """Return weight codes for the tokens [start, end), as views in order."""
        code_bytes = self.layout.weight_bytes
        if code_bytes is None:
            return self._padding_codes(start, end)
        views = []
        run = bisect_right(self._run_tokens, start) - 1
        while start < end:
            run_end = min(end, self._run_tokens[run + 1])
            if self._run_bytes[run] == PADDING:
                views.append(self.padding.codes(run_end - start))
            else:
                byte = int(code_bytes[run]) + start - self._run_tokens[run]
                views.append(self.file.read(byte, byte + run_end - start))
            start, run = run_end, run + 1
        return views

    def _padding_codes(self, start: int, end: int) -> list[Bytes]:
        """Return codes where shards store none: packing alone has given the dataset its table of
        weights, and only padding differs from code 0."""
        gaps = self.layout.padding
        assert gaps is not None, "a dataset with weights has codes in every shard"
        codes = np.zeros(end - start, np.uint8)
        first_gap, end_gap = gaps[:, 1].searchsorted(start, "right"), gaps[:, 0].searchsorted(end)
        for gap_start, gap_end in gaps[first_gap:end_gap].tolist():
            codes[max(gap_start - start, 0) : gap_end - start] = self.padding.code
        return [codes]

    def origins(self, first: int, end: int) -> list[DocumentOrigin]:
        numbers = np.arange(first, end)
        if self.selection is not None:
            numbers = self.selection.documents[first:end]
        distinct = np.unique(numbers)
        origins: dict[int, DocumentOrigin] = {}
        for near in np.split(distinct, np.flatnonzero(np.diff(distinct) > MAX_GAP) + 1):
            first_near, end_near = int(near[0]), int(near[-1]) + 1
            batch = self.format.origins(
                self._read, self.shard.size, first_near, end_near, details=self.shard.details
            )
            origins.update(enumerate(batch, first_near))
        return [origins[number] for number in numbers.tolist()]

    def base_positions(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return `Selection.base_positions`, for a view's documents."""
        assert self.selection is not None, "the dataset is no view"
        return self.selection.base_positions(first, end)

    def _read(self, start: int, end: int) -> bytes:
        return self.file.read(start, end).tobytes()


class Padding:
    """Padding tokens and weight codes: end tokens without weight."""

    def __init__(self, manifest: Manifest) -> None:
        self._id = manifest.tokenizer.end_of_document or 0
        self._dtype = manifest.token_type
        self._bytes = memoryview(b"")
        self.code = len(manifest.weights or ()) - 1

    def tokens(self, count: int) -> Tokens:
        return np.full(count, self._id, self._dtype)

    def bytes(self, count: int) -> memoryview:
        """Return `count` bytes; the longest array so far is kept."""
        padding = self._bytes  # another thread may replace it
        if len(padding) < count:
            padding = self.tokens(count // self._dtype.itemsize).view(np.uint8).data
            self._bytes = padding
        return padding[:count]

    def codes(self, count: int) -> Bytes:
        return np.full(count, self.code, np.uint8)


class FifoLimit(Generic[T]):
    """Bounds several dictionaries together, first in first out."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._order: deque[tuple[dict[int, T], int]] = deque()
        self._lock = threading.Lock()

    def add(self, entries: dict[int, T], number: int, fresh: T) -> T:
        """Add an entry to a dictionary, or return the existing entry."""
        with self._lock:
            entry = entries.setdefault(number, fresh)
            if entry is fresh:
                self._order.append((entries, number))
                if len(self._order) > self.max_entries:
                    oldest_entries, oldest = self._order.popleft()
                    del oldest_entries[oldest]
            return entry


class OpenShards:
    """Bounds what a reader's datasets keep in memory, all together."""

    def __init__(self, max_shards: int = MAX_OPEN_SHARDS) -> None:
        self.shards: FifoLimit[OpenShard] = FifoLimit(max_shards)
        self.blocks: FifoLimit[array[int]] = FifoLimit(MAX_BLOCKS)
