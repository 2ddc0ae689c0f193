"""A dataset as one long sequence of tokens: any span of it, and the documents in it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..console.errors import IntegrityError, PlanError
from . import manifest as manifests
from . import storage
from .cache import Cache
from .manifest import CHUNK_BYTES, Manifest, Shard
from .permutation import Int64
from .shard_file import CachedShardFile, LocalShardFile, ShardFile
from .shards import Layout, Origin, shard_format

READERS = 16
"""Shard tables read at once: on an object store each is a request."""
OPEN_SHARDS = 512
"""Shards kept open at once: each costs a file descriptor and its document offsets."""


@dataclass(frozen=True)
class DocumentSpan:
    """A document, or the part of one, that a span of tokens holds."""

    number: int
    """Its number in the dataset."""
    first_token: int
    """In the dataset."""
    tokens: int
    """Of the whole document, its end included."""


class OpenShard:
    """A shard with its layout at hand."""

    def __init__(self, file: ShardFile, shard: Shard, manifest: Manifest) -> None:
        self.file = file
        self.shard = shard
        self.format = shard_format(manifest.format)
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.layout: Layout = self.format.layout(
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

    def fill(self, start: int, out: npt.NDArray[Any], codes: npt.NDArray[np.uint8] | None) -> None:
        """Copy the tokens from `start` on (and their weight codes) into arrays."""
        layout, width = self.layout, self._width
        run = bisect_right(self._run_tokens, start) - 1
        wanted = len(out)
        if codes is None and start + wanted <= self._run_tokens[run + 1]:  # nearly every row
            byte = self._run_bytes[run] + (start - self._run_tokens[run]) * width
            out[:] = self.file.read(byte, byte + wanted * width).view(self.dtype)
            return
        filled = 0
        while filled < wanted:
            inside = start + filled - self._run_tokens[run]
            here = min(wanted - filled, self._run_tokens[run + 1] - start - filled)
            byte = self._run_bytes[run] + inside * width
            raw = self.file.read(byte, byte + here * width).view(self.dtype)
            out[filled : filled + here] = raw
            if codes is not None and layout.weight_bytes is not None:
                byte = int(layout.weight_bytes[run]) + inside
                codes[filled : filled + here] = self.file.read(byte, byte + here)
            filled += here
            run += 1

    def document_starts(self, start: int, end: int) -> Int64:
        """The tokens in [start, end) with which a document begins."""
        starts = self._document_starts
        found: Int64 = starts[starts.searchsorted(start) : starts.searchsorted(end)]
        return found

    def origins(self, first: int, last: int) -> list[Origin]:
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


class Dataset:
    """May be read by several threads."""

    def __init__(
        self, url: str, *, generations: int | None = None, cache: Cache | None = None
    ) -> None:
        """Open a dataset, or its first `generations` generations."""
        self.url = url
        self.manifest = manifests.load(url)
        self.generations = self.manifest.generations[:generations]
        self.cache = cache
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lock = threading.RLock()
        self._shards: list[Shard] | None = None

    @property
    def hash(self) -> str:
        return self.generations[-1].hash

    @cached_property
    def palette(self) -> npt.NDArray[np.float32] | None:
        """The loss weight of each code."""
        weights = self.manifest.weights
        return None if weights is None else np.array(weights, np.float32)

    @property
    def shards(self) -> list[Shard]:
        with self._lock:
            if self._shards is None:
                with ThreadPoolExecutor(READERS) as pool:
                    tables = pool.map(partial(manifests.load_table, self.url), self.generations)
                    self._shards = [shard for table in tables for shard in table]
            return self._shards

    @cached_property
    def shard_tokens(self) -> Int64:
        """Tokens before each shard, and in all."""
        return np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)

    @cached_property
    def _shard_tokens(self) -> list[int]:
        """The same as a list, in which one number is found several times faster."""
        tokens: list[int] = self.shard_tokens.tolist()
        return tokens

    @cached_property
    def shard_documents(self) -> Int64:
        """Documents before each shard, and in all."""
        return np.cumsum([0, *(shard.documents for shard in self.shards)], dtype=np.int64)

    def fill(
        self, start: int, out: npt.NDArray[Any], codes: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Copy the tokens from `start` on, and their weight codes, into arrays."""
        filled = 0
        while filled < len(out):
            number, inside = self._place(start + filled)
            here = min(len(out) - filled, self.shards[number].tokens - inside)
            part = slice(filled, filled + here)
            self.open_shard(number).fill(inside, out[part], None if codes is None else codes[part])
            filled += here

    def document_starts(self, start: int, end: int) -> Int64:
        """The tokens in [start, end) with which a document begins."""
        found = []
        for number, first, inside, last in self._parts(start, end):
            found.append(self.open_shard(number).document_starts(inside, last - first) + first)
        return np.concatenate([*found, np.empty(0, np.int64)])

    def row(
        self, start: int, out: npt.NDArray[Any], codes: npt.NDArray[np.uint8] | None, place: int
    ) -> Int64:
        """What `fill` and `document_starts` do, in one go for a row: its tokens are filled in, and
        where in it documents begin (not counting its first token) is counted from `place`."""
        number, inside = self._place(start)
        length = len(out)
        if start + length > self._shard_tokens[number + 1]:
            self.fill(start, out, codes)
            return self.document_starts(start + 1, start + length) + (place - start)
        shard = self.open_shard(number)
        shard.fill(inside, out, codes)
        return shard.document_starts(inside + 1, inside + length) + (place - inside)

    def documents(self, start: int, end: int) -> list[DocumentSpan]:
        """The documents of which [start, end) holds a token."""
        found = []
        for number, first, inside, last in self._parts(start, end):
            starts = self.open_shard(number).layout.document_starts
            low = int(np.searchsorted(starts, inside, side="right")) - 1
            high = int(np.searchsorted(starts[:-1], last - first))
            found += [
                DocumentSpan(
                    number=int(self.shard_documents[number]) + index,
                    first_token=first + int(starts[index]),
                    tokens=int(starts[index + 1] - starts[index]),
                )
                for index in range(low, high)
                if starts[index + 1] > starts[index]
            ]
        return found

    def origins(self, first: int, last: int) -> list[Origin]:
        """Where the documents [first, last) came from."""
        found: list[Origin] = []
        while first < last:
            number = int(np.searchsorted(self.shard_documents, first, side="right")) - 1
            before = int(self.shard_documents[number])
            until = min(last, int(self.shard_documents[number + 1]))
            found += self.open_shard(number).origins(first - before, until - before)
            first = until
        return found

    def chunks(self, start: int, end: int) -> list[tuple[int, int]]:
        """The (shard, chunk of its file) pairs that hold the tokens [start, end)."""
        found = []
        for number, first, inside, last in self._parts(start, end):
            for low, high in self.open_shard(number).byte_ranges(inside, last - first):
                found += [
                    (number, chunk) for chunk in range(low // CHUNK_BYTES, -(-high // CHUNK_BYTES))
                ]
        return found

    def shards_with(self, start: int, end: int) -> list[int]:
        """The shards that hold the tokens [start, end)."""
        return [number for number, *_ in self._parts(start, end)]

    def open_shard(self, number: int) -> OpenShard:
        with self._lock:
            opened = self._open.get(number)
            if opened is not None:
                self._open.move_to_end(number)
                return opened
        shard = self.shards[number]
        opened = OpenShard(self.file(shard), shard, self.manifest)
        with self._lock:
            if len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)
            return self._open.setdefault(number, opened)

    def file(self, shard: Shard) -> ShardFile:
        if storage.is_local(self.url) and shard.stored_name is None:
            return LocalShardFile(self.url, shard)
        if self.cache is None:
            self.cache = Cache()
        return CachedShardFile(self.url, shard, self.cache)

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """The shards that hold [start, end): each one's number, the token with which it begins, the
        place in it at which the span does, and the token at which the span or the shard ends."""
        while start < end:
            number, inside = self._place(start)
            last = min(end, self._shard_tokens[number + 1])
            yield number, start - inside, inside, last
            start = last

    def _place(self, token: int) -> tuple[int, int]:
        """The shard that holds a token, and the token's number in it."""
        number = bisect_right(self._shard_tokens, token) - 1
        return number, token - self._shard_tokens[number]


def open_pinned(
    url: str, *, hash: str, generations: int, name: str, cache: Cache | None = None
) -> Dataset:
    """Open the dataset that a plan names, and refuse any other."""
    dataset = Dataset(url, generations=generations, cache=cache)
    if len(dataset.generations) < generations or dataset.hash != hash:
        raise PlanError(
            f"the dataset of source {name} is not the one that the plan was made for",
            where=url,
            mend="put the planned dataset back, or make a new plan with `mixtures plan`",
        )
    return dataset
