"""A dataset as one long sequence of tokens: any span of it, and the documents in it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...console.errors import PlanError
from ..arrays import Bytes, Int64, Tokens
from ..shards.documents import DocumentOrigin
from ..storage import storage
from . import manifest as manifests
from .cache import Cache
from .chunks import CHUNK_BYTES
from .manifest import Shard
from .open_shard import OpenShard, OpenShards
from .shard_file import CachedShardFile, LocalShardFile, ShardFile

READERS = 16
"""Shard tables read at once: on an object store each is a request."""


@dataclass(frozen=True)
class DocumentSpan:
    """A document, or the part of one, that a span of tokens holds."""

    number: int
    """Its number in the dataset."""
    first_token: int
    """In the dataset."""
    tokens: int
    """Of the whole document, its end included."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """What rows hold, as views of their shards: to be copied all at once."""

    tokens: list[Tokens] = field(default_factory=list)
    starts: list[Int64] = field(default_factory=list)
    """Where documents begin, behind a row's first token; counted in their shard."""
    offsets: list[int] = field(default_factory=list)
    """For each of these arrays, what to add to make places of its numbers."""
    shards: set[OpenShard] = field(default_factory=set)

    def document_starts(self) -> Int64:
        """The places at which documents begin."""
        if not self.starts:
            return np.empty(0, np.int64)
        offsets = np.repeat(self.offsets, [len(found) for found in self.starts])
        places: Int64 = np.concatenate(self.starts) + offsets
        return places


class Dataset:
    """May be read by several threads."""

    def __init__(
        self,
        url: str,
        *,
        generations: int | None = None,
        cache: Cache | None = None,
        open_shards: OpenShards | None = None,
    ) -> None:
        """Open a dataset, or its first `generations` generations."""
        self.url = url
        self.manifest = manifests.load(url)
        self.generations = self.manifest.generations[:generations]
        self.cache = cache
        self._open: dict[int, OpenShard] = {}
        self._open_shards = open_shards or OpenShards()
        self._lock = threading.Lock()
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
        """Read when they are first asked for: most of a table are chunk hashes, 8 KB for a shard of
        64 MB."""
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
        parts = list(self._parts(start, start + len(out)))
        copy_all([view for shard, _, low, high in parts for view in shard.tokens(low, high)], out)
        if codes is not None:
            copy_all(self.codes(start, start + len(out)), codes)

    def codes(self, start: int, end: int) -> list[Bytes]:
        """Views of the weight codes of the tokens [start, end), side by side."""
        parts = self._parts(start, end)
        return [view for shard, _, low, high in parts for view in shard.codes(low, high)]

    def document_starts(self, start: int, end: int) -> Int64:
        """The tokens in [start, end) with which a document begins."""
        found = [
            shard.document_starts(low, high) + first
            for shard, first, low, high in self._parts(start, end)
        ]
        return np.concatenate([*found, np.empty(0, np.int64)])

    def gather(self, start: int, end: int, place: int, into: Gathered) -> None:
        """Add a row, the tokens [start, end); places in it are counted from `place`."""
        for shard, first, low, high in self._parts(start, end):
            if shard not in into.shards:
                shard.file.look()
                into.shards.add(shard)
            into.tokens.extend(shard.tokens(low, high))
            into.starts.append(shard.document_starts(start - first + 1, high))
            into.offsets.append(first - start + place)

    def documents(self, start: int, end: int) -> list[DocumentSpan]:
        """The documents of which [start, end) holds a token."""
        found = []
        for shard, first, inside, last in self._parts(start, end):
            starts = shard.layout.document_starts
            low = int(np.searchsorted(starts, inside, side="right")) - 1
            high = int(np.searchsorted(starts[:-1], last))
            before = int(self.shard_documents[shard.number])
            found += [
                DocumentSpan(
                    number=before + index,
                    first_token=first + int(starts[index]),
                    tokens=int(starts[index + 1] - starts[index]),
                )
                for index in range(low, high)
                if starts[index + 1] > starts[index]
            ]
        return found

    def document(self, number: int) -> tuple[int, int]:
        """The tokens [start, end) of a document."""
        shard = int(np.searchsorted(self.shard_documents, number, side="right")) - 1
        inside = number - int(self.shard_documents[shard])
        starts = self.open_shard(shard).layout.document_starts[inside : inside + 2]
        start, end = (starts + self.shard_tokens[shard]).tolist()
        return start, end

    def origins(self, first: int, last: int) -> list[DocumentOrigin]:
        """Where the documents [first, last) came from."""
        found: list[DocumentOrigin] = []
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
        for shard, _, inside, last in self._parts(start, end):
            for low, high in shard.byte_ranges(inside, last):
                chunks = range(low // CHUNK_BYTES, -(-high // CHUNK_BYTES))
                found += [(shard.number, chunk) for chunk in chunks]
        return found

    def shards_with(self, start: int, end: int) -> range:
        """The shards that hold the tokens [start, end)."""
        return range(self._shard_with(start), self._shard_with(end - 1) + 1)

    def open_shard(self, number: int) -> OpenShard:
        opened = self._open.get(number)
        if opened is None:
            shard = self.shards[number]
            fresh = OpenShard(number, self.file(shard), shard, self.manifest)
            opened = self._open_shards.keep(self._open, fresh)
        return opened

    def is_mapped(self, shard: Shard) -> bool:
        """Whether a shard is read where it lies, and not through the cache."""
        return storage.is_local(self.url) and shard.stored_name is None

    def file(self, shard: Shard) -> ShardFile:
        if self.is_mapped(shard):
            return LocalShardFile(self.url, shard)
        if self.cache is None:
            self.cache = Cache()
        return CachedShardFile(self.url, shard, self.cache)

    def _parts(self, start: int, end: int) -> Iterator[tuple[OpenShard, int, int, int]]:
        """The shards that hold [start, end): each one, the token with which it begins, and which
        of its own tokens they are."""
        tokens, number = self._shard_tokens, self._shard_with(start)
        while start < end:
            first, last = tokens[number], min(end, tokens[number + 1])
            yield (
                self._open.get(number) or self.open_shard(number),
                first,
                start - first,
                last - first,
            )
            start, number = last, number + 1

    def _shard_with(self, token: int) -> int:
        return bisect_right(self._shard_tokens, token) - 1


def copy_all(views: list[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
    """Copy views side by side into an array, whose type may be wider."""
    if views:
        np.concatenate(views, out=out, casting="same_kind")


def open_pinned(
    url: str,
    *,
    hash: str,
    generations: int,
    name: str,
    cache: Cache | None = None,
    open_shards: OpenShards | None = None,
) -> Dataset:
    """Open the dataset that a plan names, and refuse any other."""
    dataset = Dataset(url, generations=generations, cache=cache, open_shards=open_shards)
    if len(dataset.generations) < generations or dataset.hash != hash:
        raise PlanError(
            f"the dataset of source {name} is not the one that the plan was made for",
            where=url,
            hint="put the planned dataset back, or make a new plan with `mixtures plan`",
        )
    return dataset
