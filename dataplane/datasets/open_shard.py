"""A shard that is open: where its tokens and documents lie, at hand, and views of them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque

import numpy as np

from ...console.errors import IntegrityError
from ..arrays import Bytes, Int64, Tokens
from ..shards import shard_format
from ..shards.documents import DocumentOrigin
from ..shards.format import ShardLayout
from .manifest import Manifest, Shard
from .shard_file import ShardFile

OPEN_SHARDS = 512
"""Shards that a reader keeps open: each costs a file descriptor, of which a process often has no
more than twice as many, and its document offsets."""


class OpenShard:
    """A shard with its layout at hand."""

    def __init__(self, number: int, file: ShardFile, shard: Shard, manifest: Manifest) -> None:
        self.number = number
        self.file = file
        self.shard = shard
        self.format = shard_format(manifest.format)
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.layout: ShardLayout = self.format.layout(
            self._read, shard.size, dtype=manifest.dtype, details=shard.details
        )
        # Looking one number up in a list is several times faster than in an array.
        self._width = self.dtype.itemsize
        self._run_tokens: list[int] = self.layout.run_tokens.tolist()
        self._run_bytes: list[int] = self.layout.run_bytes.tolist()
        starts = self.layout.document_starts
        self._document_starts = starts[:-1]
        if starts[-1] != shard.tokens or len(starts) != shard.documents + 1:
            raise IntegrityError(
                f"{shard.name} holds {int(starts[-1])} tokens in {len(starts) - 1} documents; its "
                f"manifest says {shard.tokens} in {shard.documents}"
            )

    def tokens(self, start: int, end: int) -> list[Tokens]:
        """Views of the tokens [start, end), side by side."""
        width, found = self._width, []
        run = bisect_right(self._run_tokens, start) - 1
        while start < end:
            last = min(end, self._run_tokens[run + 1])
            byte = self._run_bytes[run] + (start - self._run_tokens[run]) * width
            found.append(self.file.read(byte, byte + (last - start) * width).view(self.dtype))
            start, run = last, run + 1
        return found

    def codes(self, start: int, end: int) -> list[Bytes]:
        """Views of their weight codes."""
        places = self.layout.weight_bytes
        assert places is not None, "a dataset with a palette has codes in every shard"
        found = []
        run = bisect_right(self._run_tokens, start) - 1
        while start < end:
            last = min(end, self._run_tokens[run + 1])
            byte = int(places[run]) + start - self._run_tokens[run]
            found.append(self.file.read(byte, byte + last - start))
            start, run = last, run + 1
        return found

    def document_starts(self, start: int, end: int) -> Int64:
        """The tokens in [start, end) with which a document begins."""
        starts = self._document_starts
        found: Int64 = starts[starts.searchsorted(start) : starts.searchsorted(end)]
        return found

    def origins(self, first: int, last: int) -> list[DocumentOrigin]:
        return self.format.origins(
            self._read, self.shard.size, first, last, details=self.shard.details
        )

    def byte_ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """The bytes that hold the tokens [start, end)."""
        layout, width = self.layout, self._width
        ranges = []
        for run in range(bisect_right(self._run_tokens, start) - 1, len(self._run_bytes)):
            run_start, run_end = self._run_tokens[run], self._run_tokens[run + 1]
            if run_start >= end:
                break
            low, high = max(start, run_start) - run_start, min(end, run_end) - run_start
            byte = self._run_bytes[run]
            ranges.append((byte + low * width, byte + high * width))
            if layout.weight_bytes is not None:
                byte = int(layout.weight_bytes[run])
                ranges.append((byte + low, byte + high))
        return ranges

    def _read(self, start: int, end: int) -> bytes:
        return self.file.read(start, end).tobytes()


class OpenShards:
    """Bounds the shards that are open, of all datasets of a reader together: the one that was
    opened first is closed first."""

    def __init__(self) -> None:
        self._order: deque[tuple[dict[int, OpenShard], int]] = deque()
        self._lock = threading.Lock()

    def keep(self, opened: dict[int, OpenShard], shard: OpenShard) -> OpenShard:
        """Put a shard among its dataset's; returns the one that is there, if another was faster."""
        with self._lock:
            kept = opened.setdefault(shard.number, shard)
            if kept is shard:
                self._order.append((opened, shard.number))
                if len(self._order) > OPEN_SHARDS:
                    others, number = self._order.popleft()
                    del others[number]
            return kept
