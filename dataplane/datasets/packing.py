"""Packed views: whole documents of another dataset, laid out in bins of equal length.

    URL/views/<hash>.arrow   for each shard, its pieces in order: document, first token, tokens, and
                             the padding after it

A bin is a row that cuts no document: pieces follow one another, and padding fills it. Padding has
no bytes anywhere: it reads as end tokens with loss weight 0. A document longer than a bin is cut
into pieces; the first of them may fill several bins in a row.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...console.errors import IntegrityError
from ..arrays import Int64
from ..shards.format import PADDING, ShardLayout
from .manifest import Manifest

KEY = "pack"
"""Key of the settings of packing in `Manifest.settings["view"]`, and of their counts in
`Generation.provenance`."""
COLUMNS = {"document": "int32", "first": "int64", "tokens": "int64", "padding": "int32"}


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of documents that fill the bins of a shard, in order."""

    documents: Int64
    """Their documents, as numbers in the shard."""
    first: Int64
    """The first token of each in its document."""
    tokens: Int64
    padding: Int64
    """Tokens of padding after each."""

    def encode(self) -> bytes:
        """Return the content of a file of pieces."""
        import pyarrow as pa

        columns = (self.documents, self.first, self.tokens, self.padding)
        schema = pa.schema(list(COLUMNS.items()))
        table = pa.table(list(columns), schema=schema)
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        return sink.getvalue()

    @classmethod
    def decode(cls, data: bytes) -> Pieces:
        """Return the pieces of a file."""
        import pyarrow as pa

        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        return cls(*(table.column(name).to_numpy() for name in COLUMNS))

    @classmethod
    def concatenate(cls, parts: list[Pieces]) -> Pieces:
        """Return the pieces of several parts, one after another."""
        names = ("documents", "first", "tokens", "padding")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def spans(self, whole: ShardLayout) -> tuple[Int64, Int64]:
        """Return the tokens [low, high) of the shard that each piece has."""
        starts = whole.document_starts
        low = starts[self.documents] + self.first
        high = low + self.tokens
        if (high > starts[self.documents + 1]).any():
            raise IntegrityError(
                "a piece reaches beyond the end of its document",
                hint="pack the dataset again with `tokenize pack`, at another URL",
            )
        return low, high

    def padded(self, layout: ShardLayout, runs: Int64) -> ShardLayout:
        """Add the padding to a layout of the pieces alone; `runs` are the runs of each piece."""
        after = np.flatnonzero(self.padding)
        place = np.cumsum(runs)[after]
        sizes = np.insert(np.diff(layout.run_tokens), place, self.padding[after])
        ends = np.cumsum(self.tokens + self.padding)
        gaps = np.stack([(ends - self.padding)[after], ends[after]], axis=1)
        weights = layout.weight_bytes
        return ShardLayout(
            document_starts=np.concatenate([[0], ends]).astype(np.int64),
            run_tokens=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            run_bytes=np.insert(layout.run_bytes, place, PADDING),
            weight_bytes=None if weights is None else np.insert(weights, place, PADDING),
            padding=gaps,
        )


def length_of(manifest: Manifest) -> int | None:
    """Return the tokens of a bin of a packed view; None for any other dataset."""
    settings: Mapping[str, Any] = manifest.settings.get("view", {}).get(KEY) or {}
    return settings.get("length")


def padding_of(manifest: Manifest, generations: int | None = None) -> int:
    """Return the tokens of padding in a dataset, or in its first generations."""
    made = manifest.generations[:generations]
    return sum(each.provenance.get(KEY, {}).get("padding", 0) for each in made)


def documents_of(manifest: Manifest) -> int:
    """Return the number of documents of a dataset; in a packed view, several pieces may belong to
    one."""
    if length_of(manifest) is None:
        return manifest.documents
    return sum(made.provenance[KEY].get("documents", 0) for made in manifest.generations)


def describe(manifest: Manifest) -> str:
    """Describe a packing in a line."""
    made = [each.provenance[KEY] for each in manifest.generations]
    bins, documents, long = (
        sum(each.get(name, 0) for each in made) for name in ("bins", "documents", "long")
    )
    total = sum(each.provenance["view"]["documents"] for each in manifest.generations)
    rule = manifest.settings["view"][KEY]["long"]
    fate = {"cut": "cut into pieces", "drop": "left out", "keep-first": "cut to one bin"}[rule]
    return (
        f"{bins:,} bins of {length_of(manifest):,} tokens, "
        f"{padding_of(manifest) / max(1, manifest.tokens):.2%} of them padding; "
        f"{documents:,} of {total:,} documents, {long:,} longer than a bin ({fate})"
    )
