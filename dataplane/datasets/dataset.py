"""A dataset as one long sequence of tokens: any span of it, and the documents in it."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ...console.errors import IntegrityError, PlanError
from ..arrays import Bytes, Int64
from ..shards.documents import DocumentOrigin
from ..storage import storage
from . import manifest as manifests
from .cache import Cache
from .fields import FieldsReader, fields_file
from .manifest import Shard
from .open_shard import OpenShard, OpenShards, Padding
from .shard_file import CachedShardFile, LocalShardFile, ShardFile
from .shard_tables import BLOCK_SHARDS, ShardTables
from .view import Selection, check_dataset, parse_view, read_selection


@dataclass(frozen=True)
class DocumentSpan:
    """A document that overlaps a span of tokens."""

    number: int
    """Document number in the dataset."""
    first_token: int
    """Token offset in the dataset."""
    tokens: int
    """Document length, end token included."""


@dataclass(frozen=True, eq=False)
class ShardSpans:
    """Token spans, cut to one shard."""

    shard: int
    """Shard number in the dataset."""
    first_token: int
    """The shard's token offset in the dataset."""
    span_ids: Int64
    """Index into the uncut spans."""
    starts: Int64
    """First token, counted in the shard."""
    ends: Int64
    """One past the last token, counted in the shard."""


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
        """Open the first `generations` generations; by default, all."""
        self.url = url
        self.manifest = manifests.load(url)
        self.generations = self.manifest.generations[:generations]
        self.cache = cache
        self._open: dict[int, OpenShard] = {}
        self._open_shards = open_shards or OpenShards()
        self._lock = threading.Lock()
        self.view = parse_view(url, self.manifest)
        check_dataset(url, self.view)
        self.tokens = sum(generation.tokens for generation in self.generations)
        self.shards_url = self.view.url if self.view else url
        """URL of the dataset with the shard files: for a view, the base dataset's."""
        self._shards: ShardTables | None = None
        self._fields: tuple[int, FieldsReader, Selection | None] | None = None
        self._blocks: dict[int, array[int]] = {}
        self._files: WeakValueDictionary[str, ShardFile] = WeakValueDictionary()

    @property
    def hash(self) -> str:
        return self.generations[-1].hash

    @cached_property
    def weight_table(self) -> npt.NDArray[np.float32] | None:
        """Loss weight by code, or None if the dataset has no weight codes."""
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
        """Copy tokens from `start` on, and optionally their weight codes, into arrays."""
        ranges = list(self._shard_ranges(start, start + len(out)))
        concatenate_views(
            [view for shard, _, low, high in ranges for view in shard.tokens(low, high)], out
        )
        if codes is not None:
            concatenate_views(self.codes(start, start + len(out)), codes)

    def codes(self, start: int, end: int) -> list[Bytes]:
        """Return weight codes for the tokens [start, end), as views in order."""
        ranges = self._shard_ranges(start, end)
        codes = [view for shard, _, low, high in ranges for view in shard.codes(low, high)]
        if end > self.tokens:
            codes.append(self.padding.codes(end - self.tokens))
        return codes

    def documents(self, start: int, end: int) -> list[DocumentSpan]:
        """Return the documents that overlap the tokens [start, end)."""
        spans = []
        for shard, first, first_inside, end_inside in self._shard_ranges(start, end):
            starts, lengths = shard.layout.document_starts, shard.layout.document_tokens
            first_index = int(np.searchsorted(starts, first_inside, side="right")) - 1
            end_index = int(np.searchsorted(starts[:-1], end_inside))
            first_number = int(self.shard_documents[shard.number])
            spans += [
                DocumentSpan(
                    number=first_number + index,
                    first_token=first + int(starts[index]),
                    tokens=int(lengths[index]),
                )
                for index in range(first_index, end_index)
                if lengths[index] and starts[index] + lengths[index] > first_inside
            ]
        return spans

    def document(self, number: int) -> tuple[int, int]:
        """Return a document's token range [start, end)."""
        starts, ends = self.document_spans(np.array([number]))
        return int(starts[0]), int(ends[0])

    def document_spans(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Return the token ranges [start, end) of documents."""
        starts, ends = np.empty((2, len(numbers)), np.int64)
        shards = np.searchsorted(self.shard_documents, numbers, side="right") - 1
        order = np.argsort(shards, kind="stable")
        for shard_numbers in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
            if not len(shard_numbers):
                continue
            shard = int(shards[shard_numbers[0]])
            layout, first_token = self.open_shard(shard).layout, int(self.shard_tokens[shard])
            indices = numbers[shard_numbers] - self.shard_documents[shard]
            starts[shard_numbers] = first_token + layout.document_starts[indices]
            ends[shard_numbers] = starts[shard_numbers] + layout.document_tokens[indices]
        return starts, ends

    def origins(self, first: int, end: int) -> list[DocumentOrigin]:
        """Return the origins of the documents [first, end)."""
        return [
            origin
            for shard, *span in self._document_ranges(first, end)
            for origin in self.open_shard(shard).origins(*span)
        ]

    @cached_property
    def has_ids(self) -> bool:
        """True if the dataset keeps the corpus' ids of its documents."""
        shards = (number for number, shard in enumerate(self.shards) if shard.documents)
        return any(self.open_shard(number).origins(0, 1)[0].id is not None for number in shards)

    def find_ids(self, ids: Collection[str]) -> Iterator[tuple[int, DocumentOrigin]]:
        """Yield the documents whose corpus' id is among `ids`: number and origin."""
        for shard, first in enumerate(self.shard_documents[:-1].tolist()):
            origins = self.open_shard(shard).origins(0, self.shards[shard].documents)
            for number, origin in enumerate(origins, first):
                if origin.id in ids:
                    yield number, origin

    def find_lengths(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the documents with this many tokens: number and first token."""
        for shard, first in enumerate(self.shard_documents[:-1].tolist()):
            layout, first_token = self.open_shard(shard).layout, int(self.shard_tokens[shard])
            for index in np.flatnonzero(layout.document_tokens == tokens).tolist():
                yield first + index, first_token + int(layout.document_starts[index])

    def fields(self, first: int, end: int) -> list[dict[str, Any]]:
        """Return the kept fields of the documents [first, end); empty if the dataset keeps none."""
        names = list(self.manifest.kept_fields)
        rows: list[dict[str, Any]] = self.columns(first, end, names).to_pylist() if names else []
        return rows

    def columns(self, first: int, end: int, names: Sequence[str]) -> Any:
        """Return a table with a row per document in [first, end). Columns: kept fields, and
        `document` (the number), `tokens`, `file`, `position`, `id`."""
        import pyarrow as pa

        ranges = self._document_ranges(first, end)
        return pa.concat_tables([self._shard_columns(*span, names) for span in ranges])

    def _shard_columns(self, number: int, first: int, end: int, names: Sequence[str]) -> Any:
        import pyarrow as pa

        field_names = [name for name in names if name in self.manifest.kept_fields]
        columns: dict[str, Any] = {}
        if field_names:
            rows = self._field_rows(number, first, end)
            columns |= {name: rows.column(name) for name in field_names}
        if "document" in names:
            first_number = int(self.shard_documents[number])
            columns["document"] = np.arange(first_number + first, first_number + end)
        if "tokens" in names:
            columns["tokens"] = self.open_shard(number).layout.document_tokens[first:end]
        if origin_names := [name for name in names if name in ("file", "position", "id")]:
            origins = self.open_shard(number).origins(first, end)
            types = {"file": pa.string(), "position": pa.int64(), "id": pa.string()}
            for name in origin_names:
                values = [getattr(origin, name) for origin in origins]
                columns[name] = pa.array(values, types[name])
        return pa.table({name: columns[name] for name in names})

    def _field_rows(self, number: int, first: int, end: int) -> Any:
        """Return the kept fields of a shard's documents [first, end). The last reader is kept."""
        if self._fields is None or self._fields[0] != number:
            shard = self.shards[number]
            file = fields_file(shard)
            if file is None:
                raise IntegrityError(
                    f"shard {number} of {self.url} has no file of fields; its manifest names some",
                    hint="build the dataset again at another URL",
                )
            selection = read_selection(self.url, shard)
            self._fields = number, FieldsReader(self.shards_url, file), selection
        _, reader, selection = self._fields
        if selection is None:
            return reader.rows(first, end)
        numbers = selection.documents[first:end]
        low, high = int(numbers.min()), int(numbers.max()) + 1
        return reader.rows(low, high).take(numbers - low)

    def base_positions(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return, for a view's documents [first, end), document numbers in the base dataset, and
        the token where each begins in that document: 0, unless packing has cut it."""
        return [
            position
            for shard, *span in self._document_ranges(first, end)
            for position in self.open_shard(shard).base_positions(*span)
        ]

    def _document_ranges(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shards that hold the documents [first, end): shard number, and the range of
        documents counted in the shard."""
        while first < end:
            number = int(np.searchsorted(self.shard_documents, first, side="right")) - 1
            before, after = (int(count) for count in self.shard_documents[number : number + 2])
            end_in_shard = min(end, after)
            yield number, first - before, end_in_shard - before
            first = end_in_shard

    def split(self, starts: Int64, ends: Int64) -> Iterator[ShardSpans]:
        """Cut token spans [start, end) at shard boundaries; yield shard by shard."""
        spans = np.argsort(starts, kind="stable")
        starts, ends = starts[spans], np.minimum(ends[spans], self.tokens)
        while len(spans):
            number, first, shard_end = self._shard_at(int(starts[0]))
            count = int(starts.searchsorted(shard_end))
            ends_in_shard = np.minimum(ends[:count], shard_end)
            yield ShardSpans(
                number, first, spans[:count], starts[:count] - first, ends_in_shard - first
            )
            crossing = np.flatnonzero(ends[:count] > shard_end)
            starts = np.concatenate([np.full(len(crossing), shard_end), starts[count:]])
            spans, ends = (
                np.concatenate([values[crossing], values[count:]]) for values in (spans, ends)
            )

    def open_shard(self, number: int) -> OpenShard:
        opened = self._open.get(number)
        if opened is None:
            shard = self.shards[number]
            selection = read_selection(self.url, shard)
            fresh = OpenShard(
                number, self.file(shard), shard, self.manifest, self.padding, selection
            )
            opened = self._open_shards.shards.add(self._open, number, fresh)
        return opened

    def get_open_shard(self, number: int) -> OpenShard | None:
        """Return a shard if it is open, else None."""
        return self._open.get(number)

    def is_mapped(self, shard: Shard) -> bool:
        """Return True if a shard is memory-mapped in place, False if read through the cache."""
        return storage.is_local(self.shards_url) and shard.stored_name is None

    def file(self, shard: Shard) -> ShardFile:
        """Return a shard's file. Shards of a sorted view share files, and what is verified."""
        file = self._files.get(shard.name)
        if file is None:
            if self.is_mapped(shard):
                file = LocalShardFile(self.shards_url, shard)
            else:
                if self.cache is None:
                    self.cache = Cache()
                file = CachedShardFile(self.shards_url, shard, self.cache)
            self._files[shard.name] = file
        return file

    def _shard_ranges(self, start: int, end: int) -> Iterator[tuple[OpenShard, int, int, int]]:
        """Yield the shards that hold the tokens [start, end): shard, its token offset in the
        dataset, and the token range counted in the shard."""
        end = min(end, self.tokens)
        while start < end:
            number, first, shard_end = self._shard_at(start)
            end_in_shard = min(end, shard_end)
            yield (
                self._open.get(number) or self.open_shard(number),
                first,
                start - first,
                end_in_shard - first,
            )
            start = end_in_shard

    def _shard_at(self, token: int) -> tuple[int, int, int]:
        """Return the shard that holds a token: shard number, first token, end token."""
        block = bisect_right(self._block_starts, token) - 1
        tokens = self._blocks.get(block)
        if tokens is None:
            fresh = self.shards.block_tokens(block)
            tokens = self._open_shards.blocks.add(self._blocks, block, fresh)
        index = bisect_right(tokens, token) - 1
        return block * BLOCK_SHARDS + index, tokens[index], tokens[index + 1]

    @cached_property
    def _block_starts(self) -> array[int]:
        return self.shards.block_starts


def concatenate_views(views: list[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
    """Concatenate views into `out`, whose type may be wider."""
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
    """Open a plan's dataset; raise if the dataset at `url` has another hash."""
    dataset = Dataset(url, generations=generations, cache=cache, open_shards=open_shards)
    if len(dataset.generations) < generations or dataset.hash != hash:
        raise PlanError(
            f"the dataset of source {name} is not the one that the plan was made for",
            where=url,
            hint="put the planned dataset back, or make a new plan with `mixtures plan`",
        )
    return dataset
