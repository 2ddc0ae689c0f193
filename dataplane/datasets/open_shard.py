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

OPEN_SHARDS = 512
"""Shards that a reader keeps open. Each costs its document offsets and a file descriptor, and the
usual limit is 1,024 descriptors per process."""
KEPT_BLOCKS = 2048
"""Blocks of shards whose token counts a reader keeps: about 2 MB."""

NEAR = 64
"""Documents between two that are read by one call when origins are read."""

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
        """Open a shard, or those of its documents that a view has."""
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
            self.layout = selection.layout(self.layout, self.dtype.itemsize)
        self._width = self.dtype.itemsize
        # Indexing these is several times faster than indexing a numpy array.
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
        """Return views of the tokens [start, end), in order."""
        width, views = self._width, []
        run = bisect_right(self._run_tokens, start) - 1
        while start < end:
            last = min(end, self._run_tokens[run + 1])
            place = self._run_bytes[run]
            if place == PADDING:
                views.append(self.padding.tokens(last - start))
            else:
                byte = place + (start - self._run_tokens[run]) * width
                views.append(self.file.read(byte, byte + (last - start) * width).view(self.dtype))
            start, run = last, run + 1
        return views

    def codes(self, start: int, end: int) -> list[Bytes]:
        """Return views of the weight codes of the tokens [start, end), in order."""
        places = self.layout.weight_bytes
        if places is None:
            return self._codes_of_packing(start, end)
        views = []
        run = bisect_right(self._run_tokens, start) - 1
        while start < end:
            last = min(end, self._run_tokens[run + 1])
            if self._run_bytes[run] == PADDING:
                views.append(self.padding.codes(last - start))
            else:
                byte = int(places[run]) + start - self._run_tokens[run]
                views.append(self.file.read(byte, byte + last - start))
            start, run = last, run + 1
        return views

    def _codes_of_packing(self, start: int, end: int) -> list[Bytes]:
        """Return the codes where packing alone has given the dataset a table of weights: many runs
        have none, so padding is looked for instead."""
        gaps = self.layout.padding
        assert gaps is not None, "a dataset with weights has codes in every shard"
        codes = np.zeros(end - start, np.uint8)
        first, last = gaps[:, 1].searchsorted(start, "right"), gaps[:, 0].searchsorted(end)
        for low, high in gaps[first:last].tolist():
            codes[max(low - start, 0) : high - start] = self.padding.code
        return [codes]

    def origins(self, first: int, last: int) -> list[DocumentOrigin]:
        numbers = np.arange(first, last)
        if self.selection is not None:
            numbers = self.selection.documents[first:last]
        distinct = np.unique(numbers)
        found: dict[int, DocumentOrigin] = {}
        for part in np.split(distinct, np.flatnonzero(np.diff(distinct) > NEAR) + 1):
            low, high = int(part[0]), int(part[-1]) + 1
            origins = self.format.origins(
                self._read, self.shard.size, low, high, details=self.shard.details
            )
            found.update(enumerate(origins, low))
        return [found[number] for number in numbers.tolist()]

    def places_in_view(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return for documents of a view their numbers in its dataset, and the first token of each
        in that document."""
        assert self.selection is not None, "the dataset is no view"
        return self.selection.places(first, last)

    def _read(self, start: int, end: int) -> bytes:
        return self.file.read(start, end).tobytes()


class Padding:
    """The tokens and weight codes of padding: end tokens without weight."""

    def __init__(self, manifest: Manifest) -> None:
        self._id = manifest.tokenizer.end_of_document or 0
        self._dtype = manifest.token_type
        self._bytes = memoryview(b"")
        self.code = len(manifest.weights or ()) - 1

    def tokens(self, count: int) -> Tokens:
        return np.full(count, self._id, self._dtype)

    def bytes(self, count: int) -> memoryview:
        """Return the bytes of tokens; the longest so far are kept."""
        padding = self._bytes  # another thread may replace it
        if len(padding) < count:
            padding = self.tokens(count // self._dtype.itemsize).view(np.uint8).data
            self._bytes = padding
        return padding[:count]

    def codes(self, count: int) -> Bytes:
        return np.full(count, self.code, np.uint8)


class Newest(Generic[T]):
    """Limits the entries of all dictionaries of a reader together; the oldest is dropped first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._order: deque[tuple[dict[int, T], int]] = deque()
        self._lock = threading.Lock()

    def keep(self, entries: dict[int, T], number: int, fresh: T) -> T:
        """Add an entry to its dictionary, or return the one that is there."""
        with self._lock:
            kept = entries.setdefault(number, fresh)
            if kept is fresh:
                self._order.append((entries, number))
                if len(self._order) > self.most:
                    others, oldest = self._order.popleft()
                    del others[oldest]
            return kept


class OpenShards:
    """Limits what the datasets of a reader keep in memory, all of them together."""

    def __init__(self, max_shards: int = OPEN_SHARDS) -> None:
        self.shards: Newest[OpenShard] = Newest(max_shards)
        self.blocks: Newest[array[int]] = Newest(KEPT_BLOCKS)
