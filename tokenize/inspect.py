"""Describe a dataset for people: size, settings, origin, and documents as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..console.errors import InputError
from ..console.progress import as_bytes, human
from ..dataplane import tokenizers
from ..dataplane.account.account import left_out_of, records_read, splits_in_words
from ..dataplane.datasets import manifest, packing
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.datasets.fields import as_text
from ..dataplane.datasets.view import View, documents_of, view_of
from ..dataplane.shards.documents import DocumentOrigin
from ..dataplane.tokenizers.brackets import bracketed


def summary(url: str) -> dict[str, Any]:
    """Return the contents of the manifest as data."""
    held = manifest.load(url)
    return {
        "url": url,
        "hash": held.hash,
        "format": held.format,
        "dtype": held.dtype,
        "documents": held.documents,
        "tokens": held.tokens,
        "tokenizer": {
            "kind": held.tokenizer.kind,
            "vocab_size": held.tokenizer.vocab_size,
            "end_of_document": held.tokenizer.end_of_document,
            "fingerprint": held.tokenizer.fingerprint,
        },
        "weights": held.weights,
        "fields": held.kept_fields,
        "settings": held.settings,
        "generations": [
            {
                "hash": made.hash,
                "documents": made.documents,
                "tokens": made.tokens,
                "bytes": made.size,
                "shards": made.shards,
                **_counted(made.provenance.get("counts")),
                **made.provenance,
            }
            for made in held.generations
        ],
    }


def _counted(counts: Mapping[str, int] | None) -> dict[str, Any]:
    """Return how many records a generation read, and how many it left out for each reason."""
    if counts is None or "documents read" not in counts:
        return {}
    return {"records_read": records_read(counts), "left_out": left_out_of(counts)}


def as_data(url: str, numbers: Iterable[int]) -> dict[str, Any]:
    """Return the contents of the manifest, and some documents, as data."""
    shown = []
    for number in numbers:
        held = document(url, number)
        fields = {} if held.fields is None else {"fields": held.fields}
        origin = {"origin": vars(held.origin), **fields, "ids": held.ids, "weights": held.weights}
        shown.append({**origin, "text": text(url, held.ids)})
    return {**summary(url), "shown": shown}


def describe(url: str) -> str:
    """Return the contents of the manifest as text."""
    held = manifest.load(url)
    info = held.tokenizer
    view = view_of(url, held)
    lines = [
        f"{url}",
        f"  {held.tokens:,} tokens in {held.documents:,} {_documents(view)} "
        f"({held.tokens / max(1, held.documents):,.1f} each)",
        f"  {held.format}, {held.dtype}; tokenizer {info.kind} of {info.vocab_size:,} ids, "
        + _end(info.end_of_document),
        f"  hash {held.hash}",
    ]
    if view is not None and view.bins is not None:
        lines += [f"  view of {view.url}: {view.text}", f"  {packing.describe(held)}"]
    elif view is not None:
        documents, tokens = documents_of(held)
        lines.append(f"  view of {view.url}: its documents {view.text}")
        lines.append(
            f"  {held.documents / max(1, documents):.1%} of its {documents:,} documents, "
            f"{held.tokens / max(1, tokens):.1%} of its {tokens:,} tokens"
        )
    if held.weights is not None:
        lines.append(f"  loss weights {', '.join(map(str, held.weights))}")
    if held.kept_fields:
        kept = ", ".join(f"{name} ({kind})" for name, kind in held.kept_fields.items())
        lines.append(f"  fields {kept}")
    if chat := held.settings.get("chat"):
        parts = "the turns of the assistant" if chat["learn"] == "assistant" else "everything"
        lines.append(f"  chat template {chat['template'][:12]}, learns {parts}")
        lines += [f"    {name} = {value!r}" for name, value in chat["variables"].items()]
    if fim := held.settings.get("fim"):
        lines.append(
            f"  fill-in-the-middle in {fim['rate']:.1%} of the documents, {fim['spm']:.1%} of them "
            f"with the suffix first; sentinels {', '.join(fim['sentinels'])}"
        )
    for number, made in enumerate(held.generations):
        lines.append(
            f"  generation {number}: {made.documents:,} documents, {human(made.tokens)} tokens, "
            f"{as_bytes(made.size)} in {made.shards} shards"
        )
        if inputs := made.provenance.get("inputs"):
            lines.append(f"    from {described_inputs([inputs])}")
        if counts := made.provenance.get("counts"):
            together = splits_in_words(held)
            lines += [f"    counts of {together}:"] if together else []
            lines += [f"    {name}: {count:,}" for name, count in counts.items()]
    return "\n".join(lines)


def described_inputs(inputs: Sequence[Mapping[str, Any]]) -> str:
    """Return the number and the size of the files that generations were built from."""
    files, size, compressed = (
        sum(entry.get(key, 0) for entry in inputs) for key in ("files", "bytes", "compressed")
    )
    packed = "compressed" if compressed == size else f"{as_bytes(compressed)} of them compressed"
    stored = f"{files:,} file{'s' * (files != 1)}, {as_bytes(size)} as stored"
    return f"{stored}, {packed}" if compressed else stored


def _documents(view: View | None) -> str:
    return "documents" if view is None or view.bins is None else "pieces of documents"


def _end(id: int | None) -> str:
    return "the end of documents is unknown" if id is None else f"documents end with {id}"


@dataclass(frozen=True)
class ShownDocument:
    """A document of a dataset."""

    origin: DocumentOrigin
    fields: dict[str, Any] | None
    """Its kept fields; None if the dataset keeps none."""
    ids: list[int]
    weights: list[float] | None = None
    """Loss weight of each id; None if all have the weight 1."""


def document(url: str, number: int) -> ShownDocument:
    """Return a document, by its number in the dataset."""
    dataset = Dataset(url)
    total = int(dataset.shard_documents[-1])
    if not 0 <= number < total:
        raise InputError(f"{url} has {total:,} documents, and none has number {number}")
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


def described_document(url: str, number: int) -> str:
    """Return a document as text, below its origin and its kept fields."""
    held = document(url, number)
    lines = [f"--- document {number}: {len(held.ids)} tokens, {held.origin}"]
    if held.fields is not None:
        lines.append(f"--- {as_text(held.fields)}")
    return "\n".join([*lines, text(url, held.ids, held.weights)])


def text(url: str, ids: list[int], weights: list[float] | None = None) -> str:
    """Decode ids with the dataset's tokenizer; with weights, in brackets what is not learnt."""
    tokenizer = tokenizers.load(manifest.load(url).tokenizer, url)
    return tokenizer.decode(ids) if weights is None else bracketed(tokenizer, ids, weights)
