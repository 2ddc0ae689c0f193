"""A dataset for humans: what it is, what it came from, and its documents as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..console.errors import InputError
from ..console.progress import as_bytes, human
from ..dataplane import tokenizers
from ..dataplane.datasets import manifest
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.shards.documents import DocumentOrigin


def summary(url: str) -> dict[str, Any]:
    """What the manifest says, as data."""
    found = manifest.load(url)
    return {
        "url": url,
        "hash": found.hash,
        "format": found.format,
        "dtype": found.dtype,
        "documents": found.documents,
        "tokens": found.tokens,
        "tokenizer": {
            "kind": found.tokenizer.kind,
            "vocab_size": found.tokenizer.vocab_size,
            "end_of_document": found.tokenizer.end_of_document,
            "fingerprint": found.tokenizer.fingerprint,
        },
        "weights": found.weights,
        "settings": found.settings,
        "generations": [
            {
                "hash": made.hash,
                "documents": made.documents,
                "tokens": made.tokens,
                "bytes": made.size,
                "shards": made.shards,
                **made.provenance,
            }
            for made in found.generations
        ],
    }


def describe(url: str) -> str:
    """The same for people."""
    found = manifest.load(url)
    info = found.tokenizer
    lines = [
        f"{url}",
        f"  {found.tokens:,} tokens in {found.documents:,} documents "
        f"({found.tokens / max(1, found.documents):,.1f} each)",
        f"  {found.format}, {found.dtype}; tokenizer {info.kind} of {info.vocab_size:,} ids, "
        + _end(info.end_of_document),
        f"  hash {found.hash}",
    ]
    if found.weights is not None:
        lines.append(f"  loss weights {', '.join(map(str, found.weights))}")
    for number, made in enumerate(found.generations):
        lines.append(
            f"  generation {number}: {made.documents:,} documents, {human(made.tokens)} tokens, "
            f"{as_bytes(made.size)} in {made.shards} shards"
        )
        inputs = made.provenance.get("inputs", {})
        if inputs:
            lines.append(f"    from {inputs['files']} files, {as_bytes(inputs['bytes'])}")
        for name, count in made.provenance.get("counts", {}).items():
            lines.append(f"    {name}: {count:,}")
    return "\n".join(lines)


def _end(id: int | None) -> str:
    return "documents have no known end" if id is None else f"documents end with {id}"


def document(url: str, number: int) -> tuple[DocumentOrigin, list[int]]:
    """Where the document `number` of a dataset came from, and its ids."""
    dataset = Dataset(url)
    total = int(dataset.shard_documents[-1])
    if not 0 <= number < total:
        raise InputError(f"{url} has {total:,} documents: there is no number {number}")
    start, end = dataset.document(number)
    ids = np.empty(end - start, np.int64)
    dataset.fill(start, ids)
    return dataset.origins(number, number + 1)[0], ids.tolist()


def text(url: str, ids: list[int]) -> str:
    return tokenizers.load(manifest.load(url).tokenizer, url).decode(ids)
