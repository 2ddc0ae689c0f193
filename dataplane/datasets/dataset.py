"""A dataset as one long sequence of tokens: any span of it, and the documents in it."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...console.errors import IntegrityError, PlanError
from ..arrays import Bytes, Int64
from ..shards.documents import DocumentOrigin
from ..storage import storage
from . import manifest as manifests
from .cache import Cache
from .fields import FieldsReader, file_of
from .manifest import Shard
from .open_shard import OpenShard, OpenShards, Padding
from .shard_file import CachedShardFile, LocalShardFile, ShardFile
from .shard_tables import BLOCK, ShardTables
from .view import Selection, check_dataset, selection_of, view_of


@dataclass(frozen=True)
class DocumentSpan:
    """A document of which a span of tokens holds at least one token."""

    number: int
    """Its number in the dataset."""
    first_token: int
    """Offset in the dataset."""
    tokens: int
    """Length of the whole document, end token included."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of some spans that lie in one shard."""

    shard: int
    """Its number in the dataset."""
    first: int
    """Its first token in the dataset."""
    spans: Int64
    """The index of each part's span."""
    lows: Int64
    """First token of each part, in the shard."""
    highs: Int64
    """One past the last."""


class Dataset:
    """A dataset, opened for reading. Thread-safe."""

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
        self.view = view_of(url, self.manifest)
        check_dataset(url, self.view)
        self.tokens = sum(generation.tokens for generation in self.generations)
        self.shards_url = self.view.url if self.view else url
        """The URL of the dataset that holds the files: this one's, or that of a view."""
        self._shards: ShardTables | None = None
        self._fields: tuple[int, FieldsReader, Selection | None] | None = None
        self._blocks: dict[int, array[int]] = {}

    @property
    def hash(self) -> str:
        return self.generations[-1].hash

    @cached_property
    def weight_table(self) -> npt.NDArray[np.float32] | None:
        """The loss weight of each code, or None if the dataset has no weight codes."""
        weights = self.manifest.weights
        return None if weights is None else np.array(weights, np.float32)

    @cached_property
    def padding(self) -> Padding:
        return Padding(self.manifest)

    @property
    def shards(self) -> ShardTables:
        """The shards, mapped on first use."""
        with self._lock:
            if self._shards is None:
                self._shards = ShardTables(self.url, self.generations)
            return self._shards

    @cached_property
    def shard_tokens(self) -> Int64:
        """Tokens before each shard, then the total."""
        return self.shards.sums("tokens")

    @cached_property
    def shard_documents(self) -> Int64:
        """Documents before each shard, then the total."""
        return self.shards.sums("documents")

    def fill(
        self, start: int, out: npt.NDArray[Any], codes: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Copy the tokens from `start` on, and optionally their weight codes, into arrays."""
        parts = list(self._parts(start, start + len(out)))
        copy_all([view for shard, _, low, high in parts for view in shard.tokens(low, high)], out)
        if codes is not None:
            copy_all(self.codes(start, start + len(out)), codes)

    def codes(self, start: int, end: int) -> list[Bytes]:
        """Return views of the weight codes of the tokens [start, end), in order."""
        parts = self._parts(start, end)
        codes = [view for shard, _, low, high in parts for view in shard.codes(low, high)]
        if end > self.tokens:
            codes.append(self.padding.codes(end - self.tokens))
        return codes

    def documents(self, start: int, end: int) -> list[DocumentSpan]:
        """Return the documents of which [start, end) holds a token."""
        spans = []
        for shard, first, inside, last in self._parts(start, end):
            starts, lengths = shard.layout.document_starts, shard.layout.document_tokens
            low = int(np.searchsorted(starts, inside, side="right")) - 1
            high = int(np.searchsorted(starts[:-1], last))
            before = int(self.shard_documents[shard.number])
            spans += [
                DocumentSpan(
                    number=before + index,
                    first_token=first + int(starts[index]),
                    tokens=int(lengths[index]),
                )
                for index in range(low, high)
                if lengths[index] and starts[index] + lengths[index] > inside
            ]
        return spans

    def document(self, number: int) -> tuple[int, int]:
        """Return the tokens [start, end) of a document."""
        shard = int(np.searchsorted(self.shard_documents, number, side="right")) - 1
        inside = number - int(self.shard_documents[shard])
        layout = self.open_shard(shard).layout
        start = int(self.shard_tokens[shard] + layout.document_starts[inside])
        return start, start + int(layout.document_tokens[inside])

    def origins(self, first: int, last: int) -> list[DocumentOrigin]:
        """Return where the documents [first, last) came from."""
        parts = self._by_shard(first, last)
        return [at for n, low, high in parts for at in self.open_shard(n).origins(low, high)]

    def fields(self, first: int, last: int) -> list[dict[str, Any]]:
        """Return the kept fields of the documents [first, last); nothing if there are none."""
        names = list(self.manifest.kept_fields)
        rows: list[dict[str, Any]] = self.columns(first, last, names).to_pylist() if names else []
        return rows

    def columns(self, first: int, last: int, names: Sequence[str]) -> Any:
        """Return a table of the documents [first, last): kept fields, and what every document has:
        `document` (its number), `tokens`, `file`, `position`, `id`."""
        import pyarrow as pa

        parts = self._by_shard(first, last)
        return pa.concat_tables([self._shard_columns(*part, names) for part in parts])

    def _shard_columns(self, number: int, first: int, last: int, names: Sequence[str]) -> Any:
        import pyarrow as pa

        kept = [name for name in names if name in self.manifest.kept_fields]
        columns: dict[str, Any] = {}
        if kept:
            rows = self._kept_rows(number, first, last)
            columns |= {name: rows.column(name) for name in kept}
        if "document" in names:
            before = int(self.shard_documents[number])
            columns["document"] = np.arange(before + first, before + last)
        if "tokens" in names:
            columns["tokens"] = self.open_shard(number).layout.document_tokens[first:last]
        if own := [name for name in names if name in ("file", "position", "id")]:
            origins = self.open_shard(number).origins(first, last)
            types = {"file": pa.string(), "position": pa.int64(), "id": pa.string()}
            for name in own:
                values = [getattr(origin, name) for origin in origins]
                columns[name] = pa.array(values, types[name])
        return pa.table({name: columns[name] for name in names})

    def _kept_rows(self, number: int, first: int, last: int) -> Any:
        """Return the kept fields of documents of a shard; the reader of the last shard is kept."""
        if self._fields is None or self._fields[0] != number:
            shard = self.shards[number]
            file = file_of(shard)
            if file is None:
                raise IntegrityError(
                    f"shard {number} of {self.url} has no file of fields; its manifest names some",
                    hint="build the dataset again at another URL",
                )
            chosen = selection_of(self.url, shard)
            self._fields = number, FieldsReader(self.shards_url, file), chosen
        _, reader, selection = self._fields
        if selection is None:
            return reader.rows(first, last)
        numbers = selection.documents[first:last]
        low, high = int(numbers.min()), int(numbers.max()) + 1
        return reader.rows(low, high).take(numbers - low)

    def places_in_view(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return for documents [first, last) of a view their numbers in its dataset, and the token
        of that document with which each begins: 0, unless packing has cut it."""
        parts = self._by_shard(first, last)
        return [at for n, low, high in parts for at in self.open_shard(n).places_in_view(low, high)]

    def _by_shard(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards of the documents [first, last): number, and the range of its own."""
        while first < last:
            number = int(np.searchsorted(self.shard_documents, first, side="right")) - 1
            before, after = (int(each) for each in self.shard_documents[number : number + 2])
            until = min(last, after)
            yield number, first - before, until - before
            first = until

    def split(self, starts: Int64, ends: Int64) -> Iterator[Parts]:
        """Yield the parts of the spans of tokens [start, end) in each shard that holds some."""
        spans = np.argsort(starts, kind="stable")
        starts, ends = starts[spans], np.minimum(ends[spans], self.tokens)
        while len(spans):
            number, first, after = self._shard_at(int(starts[0]))
            count = int(starts.searchsorted(after))
            highs = np.minimum(ends[:count], after)
            yield Parts(number, first, spans[:count], starts[:count] - first, highs - first)
            longer = np.flatnonzero(ends[:count] > after)
            starts = np.concatenate([np.full(len(longer), after), starts[count:]])
            spans, ends = (
                np.concatenate([every[longer], every[count:]]) for every in (spans, ends)
            )

    def open_shard(self, number: int) -> OpenShard:
        opened = self._open.get(number)
        if opened is None:
            shard = self.shards[number]
            chosen = selection_of(self.url, shard)
            fresh = OpenShard(number, self.file(shard), shard, self.manifest, self.padding, chosen)
            opened = self._open_shards.shards.keep(self._open, number, fresh)
        return opened

    def opened(self, number: int) -> OpenShard | None:
        """Return a shard if it is open."""
        return self._open.get(number)

    def is_mapped(self, shard: Shard) -> bool:
        """True if a shard is memory-mapped in place, False if it is read through the cache."""
        return storage.is_local(self.shards_url) and shard.stored_name is None

    def file(self, shard: Shard) -> ShardFile:
        if self.is_mapped(shard):
            return LocalShardFile(self.shards_url, shard)
        if self.cache is None:
            self.cache = Cache()
        return CachedShardFile(self.shards_url, shard, self.cache)

    def _parts(self, start: int, end: int) -> Iterator[tuple[OpenShard, int, int, int]]:
        """Yield the shards that hold [start, end): shard, its first token in the dataset, and the
        range [low, high) of its own tokens."""
        end = min(end, self.tokens)
        while start < end:
            number, first, after = self._shard_at(start)
            last = min(end, after)
            yield (
                self._open.get(number) or self.open_shard(number),
                first,
                start - first,
                last - first,
            )
            start = last

    def _shard_at(self, token: int) -> tuple[int, int, int]:
        """Return the shard that holds a token: its number, its first token, and one past its
        last."""
        block = bisect_right(self._block_starts, token) - 1
        tokens = self._blocks.get(block)
        if tokens is None:
            fresh = self.shards.block_tokens(block)
            tokens = self._open_shards.blocks.keep(self._blocks, block, fresh)
        place = bisect_right(tokens, token) - 1
        return block * BLOCK + place, tokens[place], tokens[place + 1]

    @cached_property
    def _block_starts(self) -> array[int]:
        return self.shards.blocks


def copy_all(views: list[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
    """Copy views side by side into an array, which may have a wider type."""
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
    """Open the dataset that a plan names; raise if the one at `url` has another hash."""
    dataset = Dataset(url, generations=generations, cache=cache, open_shards=open_shards)
    if len(dataset.generations) < generations or dataset.hash != hash:
        raise PlanError(
            f"the dataset of source {name} is not the one that the plan was made for",
            where=url,
            hint="put the planned dataset back, or make a new plan with `mixtures plan`",
        )
    return dataset
