"""Describe a dataset for people: size, settings, origin, and documents as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..console.errors import InputError
from ..console.progress import exact_count, format_bytes, format_number
from ..dataplane import tokenizers
from ..dataplane.account.account import count_records_read, describe_splits, select_left_out
from ..dataplane.datasets import manifest as manifests
from ..dataplane.datasets import packing
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.datasets.fields import format_fields
from ..dataplane.datasets.view import View, base_dataset_totals, parse_view
from ..dataplane.shards.documents import DocumentOrigin
from ..dataplane.tokenizers.brackets import format_brackets


def summary(url: str) -> dict[str, Any]:
    """Return the manifest's contents as data."""
    manifest = manifests.load(url)
    return {
        "url": url,
        "hash": manifest.hash,
        "format": manifest.format,
        "dtype": manifest.dtype,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "tokenizer": {
            "kind": manifest.tokenizer.kind,
            "vocab_size": manifest.tokenizer.vocab_size,
            "end_of_document": manifest.tokenizer.end_of_document,
            "fingerprint": manifest.tokenizer.fingerprint,
        },
        "weights": manifest.weights,
        "fields": manifest.kept_fields,
        "settings": manifest.settings,
        "generations": [
            {
                "hash": generation.hash,
                "documents": generation.documents,
                "tokens": generation.tokens,
                "bytes": generation.size,
                "shards": generation.shards,
                **_record_counts(generation.provenance.get("counts")),
                **generation.provenance,
            }
            for generation in manifest.generations
        ],
    }


def _record_counts(counts: Mapping[str, int] | None) -> dict[str, Any]:
    """Return how many records a generation read, and how many it left out, by reason."""
    if counts is None or "documents read" not in counts:
        return {}
    return {"records_read": count_records_read(counts), "left_out": select_left_out(counts)}


def make_json_data(url: str, numbers: Iterable[int]) -> dict[str, Any]:
    """Return the manifest's contents, and some documents, as data."""
    documents = []
    for number in numbers:
        shown_document = document(url, number)
        fields = {} if shown_document.fields is None else {"fields": shown_document.fields}
        origin = {
            "origin": vars(shown_document.origin),
            **fields,
            "ids": shown_document.ids,
            "weights": shown_document.weights,
        }
        documents.append({**origin, "text": text(url, shown_document.ids)})
    return {**summary(url), "shown": documents}


def describe(url: str) -> str:
    """Describe the manifest's contents as text."""
    manifest = manifests.load(url)
    info = manifest.tokenizer
    view = parse_view(url, manifest)
    lines = [
        f"{url}",
        f"  {manifest.tokens:,} tokens in {manifest.documents:,} {_documents(view)} "
        f"({manifest.tokens / max(1, manifest.documents):,.1f} each)",
        f"  {manifest.format}, {manifest.dtype}; tokenizer {info.kind} of {info.vocab_size:,} ids, "
        + _end(info.end_of_document),
        f"  hash {manifest.hash}",
    ]
    if view is not None and view.bins is not None:
        lines += [f"  view of {view.url}: {view.text}", f"  {packing.describe(manifest)}"]
    elif view is not None:
        documents, tokens = base_dataset_totals(manifest)
        lines.append(f"  view of {view.url}: its documents {view.text}")
        lines.append(
            f"  {manifest.documents / max(1, documents):.1%} of its "
            f"{exact_count(documents, 'documents')}, "
            f"{manifest.tokens / max(1, tokens):.1%} of its {tokens:,} tokens"
        )
    if manifest.weights is not None:
        lines.append(f"  loss weights {', '.join(map(str, manifest.weights))}")
    if manifest.kept_fields:
        kept = ", ".join(f"{name} ({kind})" for name, kind in manifest.kept_fields.items())
        lines.append(f"  fields {kept}")
    if chat := manifest.settings.get("chat"):
        learnt_parts = (
            "the turns of the assistant" if chat["learn"] == "assistant" else "everything"
        )
        lines.append(f"  chat template {chat['template'][:12]}, learns {learnt_parts}")
        lines += [f"    {name} = {value!r}" for name, value in chat["variables"].items()]
    if fim := manifest.settings.get("fim"):
        lines.append(
            f"  fill-in-the-middle in {fim['rate']:.1%} of the documents, {fim['spm']:.1%} of them "
            f"with the suffix first; sentinels {', '.join(fim['sentinels'])}"
        )
    for number, generation in enumerate(manifest.generations):
        lines.append(
            f"  generation {number}: {exact_count(generation.documents, 'documents')}, "
            f"{format_number(generation.tokens)} tokens, "
            f"{format_bytes(generation.size)} in {generation.shards} shards"
        )
        if inputs := generation.provenance.get("inputs"):
            lines.append(f"    from {describe_inputs([inputs])}")
        if counts := generation.provenance.get("counts"):
            all_splits = describe_splits(manifest)
            lines += [f"    counts of {all_splits}:"] if all_splits else []
            lines += [f"    {name}: {count:,}" for name, count in counts.items()]
    return "\n".join(lines)


def describe_inputs(inputs: Sequence[Mapping[str, Any]]) -> str:
    """Describe the files from which generations were built: count and size."""
    files, size, compressed = (
        sum(entry.get(key, 0) for entry in inputs) for key in ("files", "bytes", "compressed")
    )
    compression = (
        "compressed" if compressed == size else f"{format_bytes(compressed)} of them compressed"
    )
    stored = f"{files:,} file{'s' * (files != 1)}, {format_bytes(size)} as stored"
    return f"{stored}, {compression}" if compressed else stored


def _documents(view: View | None) -> str:
    return "documents" if view is None or view.bins is None else "pieces of documents"


def _end(id: int | None) -> str:
    return "the end of documents is unknown" if id is None else f"documents end with {id}"


@dataclass(frozen=True)
class ShownDocument:
    """A dataset's document, to be shown."""

    origin: DocumentOrigin
    fields: dict[str, Any] | None
    """Kept fields; None if the dataset keeps none."""
    ids: list[int]
    weights: list[float] | None = None
    """Loss weights by id; None if all are 1."""


def document(url: str, number: int) -> ShownDocument:
    """Read a document by its number in the dataset."""
    dataset = Dataset(url)
    total = int(dataset.shard_documents[-1])
    if not 0 <= number < total:
        raise InputError(
            f"{url} has {exact_count(total, 'documents')}, and none has number {number}"
        )
    start, end = dataset.document(number)
    ids = np.empty(end - start, np.int64)
    dataset.fill(start, ids)
    weights = None
    if dataset.weight_table is not None:
        codes = np.concatenate(dataset.codes(start, end))
        weights = dataset.weight_table[codes].astype(float).round(6).tolist()
    fields = dataset.fields(number, number + 1)
    origin = dataset.origins(number, number + 1)[0]
    return ShownDocument(origin, fields[0] if fields else None, ids.tolist(), weights)


def describe_document(url: str, number: int) -> str:
    """Describe a document: origin, kept fields, then its text."""
    shown_document = document(url, number)
    lines = [
        f"--- document {number}: "
        f"{exact_count(len(shown_document.ids), 'tokens')}, {shown_document.origin}"
    ]
    if shown_document.fields is not None:
        lines.append(f"--- {format_fields(shown_document.fields)}")
    return "\n".join([*lines, text(url, shown_document.ids, shown_document.weights)])


def text(url: str, ids: list[int], weights: list[float] | None = None) -> str:
    """Decode ids with the dataset's tokenizer; with weights, put brackets around unlearnt text."""
    tokenizer = tokenizers.load(manifests.load(url).tokenizer, url)
    return tokenizer.decode(ids) if weights is None else format_brackets(tokenizer, ids, weights)
