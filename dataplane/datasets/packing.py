"""Packed views: whole documents of a base dataset, laid out in bins of equal length.

    URL/views/<hash>.arrow   per shard, pieces in order: document, first token, tokens, and the
                             padding after the piece

A bin is a row that cuts no document: pieces, then padding. Padding has no bytes anywhere: it reads
as end tokens with loss weight 0. A document longer than a bin is cut into pieces; the first piece
may fill several bins in a row.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...console.errors import IntegrityError
from ...console.progress import exact_count
from ..arrays import Int64
from ..shards.format import PADDING, ShardLayout
from .manifest import Manifest

KEY = "pack"
"""Key of packing settings in `Manifest.settings["view"]`, and of counts in
`Generation.provenance`."""
COLUMNS = {"document": "int32", "first": "int64", "tokens": "int64", "padding": "int32"}


@dataclass(frozen=True, eq=False)
class PackedPieces:
    """Document pieces that fill a shard's bins, in order."""

    documents: Int64
    """Document number in the shard."""
    first: Int64
    """First token, counted in the document."""
    tokens: Int64
    padding: Int64
    """Padding tokens after the piece."""

    def encode(self) -> bytes:
        """Return the content of a pieces file."""
        import pyarrow as pa

        columns = [self.documents, self.first, self.tokens, self.padding]
        table = pa.table(columns, schema=pa.schema(list(COLUMNS.items())))
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        return sink.getvalue()

    @classmethod
    def decode(cls, data: bytes) -> PackedPieces:
        """Read a pieces file."""
        import pyarrow as pa

        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        return cls(*(table.column(name).to_numpy() for name in COLUMNS))

    @classmethod
    def concatenate(cls, pieces: list[PackedPieces]) -> PackedPieces:
        """Concatenate groups of pieces."""
        names = ("documents", "first", "tokens", "padding")
        return cls(*(np.concatenate([getattr(group, name) for group in pieces]) for name in names))

    def spans(self, whole: ShardLayout) -> tuple[Int64, Int64]:
        """Return each piece's token range [start, end) in the shard."""
        document_starts = whole.document_starts
        starts = document_starts[self.documents] + self.first
        ends = starts + self.tokens
        if (ends > document_starts[self.documents + 1]).any():
            raise IntegrityError(
                "a piece reaches beyond the end of its document",
                hint="pack the dataset again with `tokenize pack`, at another URL",
            )
        return starts, ends

    def padded(self, layout: ShardLayout, run_counts: Int64) -> ShardLayout:
        """Add padding to a layout of the pieces; `run_counts` has the runs per piece."""
        padded = np.flatnonzero(self.padding)
        indices = np.cumsum(run_counts)[padded]
        sizes = np.insert(np.diff(layout.run_tokens), indices, self.padding[padded])
        ends = np.cumsum(self.tokens + self.padding)
        padding_spans = np.stack([(ends - self.padding)[padded], ends[padded]], axis=1)
        weights = layout.weight_bytes
        return ShardLayout(
            document_starts=np.concatenate([[0], ends]).astype(np.int64),
            run_tokens=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            run_bytes=np.insert(layout.run_bytes, indices, PADDING),
            weight_bytes=None if weights is None else np.insert(weights, indices, PADDING),
            padding=padding_spans,
        )


def bin_length(manifest: Manifest) -> int | None:
    """Return a packed view's bin length in tokens; None for any other dataset."""
    settings: Mapping[str, Any] = manifest.settings.get("view", {}).get(KEY) or {}
    return settings.get("length")


def count_padding(manifest: Manifest, generations: int | None = None) -> int:
    """Return the padding tokens in a dataset, or in the first `generations`."""
    counted = manifest.generations[:generations]
    return sum(generation.provenance.get(KEY, {}).get("padding", 0) for generation in counted)


def count_documents(manifest: Manifest) -> int:
    """Return a dataset's number of documents, which in a packed view may have several pieces."""
    if bin_length(manifest) is None:
        return manifest.documents
    return sum(
        generation.provenance[KEY].get("documents", 0) for generation in manifest.generations
    )


def describe(manifest: Manifest) -> str:
    """Describe a packed view in a line."""
    counts = [generation.provenance[KEY] for generation in manifest.generations]
    bins, documents, num_long = (
        sum(count.get(name, 0) for count in counts) for name in ("bins", "documents", "long")
    )
    total = sum(generation.provenance["view"]["documents"] for generation in manifest.generations)
    rule = manifest.settings["view"][KEY]["long"]
    fate = {"cut": "cut into pieces", "drop": "left out", "keep-first": "cut to one bin"}[rule]
    return (
        f"{bins:,} bins of {bin_length(manifest):,} tokens, "
        f"{count_padding(manifest) / max(1, manifest.tokens):.2%} of them padding; "
        f"{documents:,} of {exact_count(total, 'documents')}, {num_long:,} "
        f"longer than a bin ({fate})"
    )
