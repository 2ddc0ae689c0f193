"""A dataset's card: a page of Markdown with its size, origin, lengths and what was left out.

Totals are those of the manifest. Lengths, bytes and fields are counted in a sample of the shards,
spread over the dataset; the page says how large it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..console.errors import UserError
from ..console.markdown import table
from ..console.progress import as_bytes
from ..dataplane import tokenizers
from ..dataplane.arrays import Int64
from ..dataplane.datasets import about, manifest, packing
from ..dataplane.datasets.about import About
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.datasets.manifest import Manifest

SHARDS = 32
"""Shards of the sample."""
DOCUMENTS = 2048
"""Documents of a shard whose fields are counted."""
TOKENS = 1 << 18
"""Tokens of a shard whose bytes are counted."""
MOST_VALUES = 20
"""Values of a field that the page lists."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass
class Sample:
    """Counts of some shards of a dataset."""

    shards: int = 0
    lengths: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens of each document."""
    tokens: int = 0
    bytes: int | None = 0
    """Bytes of the text of `tokens`; None if the tokenizer is unknown."""
    weights: Counter[float] = field(default_factory=Counter)
    """Tokens by their loss weight; empty if all have the weight 1."""
    fields: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    """Kept fields of documents, with the tokens of each."""


def card(url: str, *, licenses: Sequence[str] = (), sources: Sequence[str] = ()) -> str:
    """Return the card of a dataset. Licences and sources that are given replace those that were
    stated before."""
    held = manifest.load(url)
    stated = about.load(url)
    if licenses or sources:
        stated = About(
            licenses=tuple(licenses) or stated.licenses, sources=tuple(sources) or stated.sources
        )
        about.save(url, stated)
    sample = sample_of(url)
    name = url.rstrip("/").rsplit("/", 1)[-1]
    parts = [
        [f"# Dataset {name}", "", *_totals(url, held, sample)],
        _origin(held, stated),
        _lengths(held, sample),
        _left_out(held),
        _settings(held),
        *(_field(key, sample) for key in held.kept_fields),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def sample_of(url: str) -> Sample:
    """Count the lengths, bytes and fields of up to SHARDS shards, spread over the dataset."""
    dataset = Dataset(url)
    held = dataset.manifest
    sample = Sample()
    sizes = None
    try:
        sizes = tokenizers.load(held.tokenizer, url).byte_sizes()
    except UserError:  # an indexed dataset may name no tokenizer
        sample.bytes = None
    count = len(dataset.shard_tokens) - 1
    lengths = [sample.lengths]
    for number in np.unique(np.linspace(0, count - 1, min(SHARDS, count)).astype(int)).tolist():
        start, end = (int(token) for token in dataset.shard_tokens[number : number + 2])
        lengths.append(dataset.open_shard(number).layout.document_tokens)
        if sizes is not None and sample.bytes is not None:
            ids = np.empty(min(TOKENS, end - start), np.int64)
            dataset.fill(start, ids)
            sample.tokens += len(ids)
            sample.bytes += int(sizes[ids].sum())
        if dataset.weight_table is not None:
            for codes in dataset.codes(start, end):
                counts = np.bincount(codes, minlength=len(dataset.weight_table)).tolist()
                for weight, tokens in zip(held.weights or (), counts, strict=True):
                    sample.weights[weight] += tokens
        if held.kept_fields:
            first = int(dataset.shard_documents[number])
            rows = dataset.fields(first, first + min(DOCUMENTS, len(lengths[-1])))
            sample.fields += zip(rows, lengths[-1].tolist(), strict=False)
        sample.shards += 1
    sample.lengths = np.concatenate(lengths)
    return sample


def _totals(url: str, held: Manifest, sample: Sample) -> list[str]:
    info = held.tokenizer
    rows: list[tuple[str, str]] = [
        ("URL", f"`{url}`"),
        ("hash", f"`{held.hash}`"),
        ("tokens", f"{held.tokens:,}"),
        *([("packed", packing.describe(held))] if packing.length_of(held) else []),
        ("pieces of documents" if packing.length_of(held) else "documents", f"{held.documents:,}"),
        ("tokens of a document", f"{held.tokens / max(1, held.documents):,.1f} on average"),
        ("tokenizer", f"{info.kind}, {info.vocab_size:,} ids, `{info.fingerprint[:16]}`"),
    ]
    if sample.bytes and sample.tokens:
        ratio = sample.bytes / sample.tokens
        rows.append(("bytes of a token", f"{ratio:.3f} in {sample.tokens:,} tokens of the sample"))
    for weight, count in sorted(sample.weights.items()):
        share = count / sample.weights.total()
        rows.append((f"tokens of loss weight {weight:g}", f"{share:.2%} in the sample"))
    files = sum(made.provenance.get("inputs", {}).get("files", 0) for made in held.generations)
    size = sum(made.provenance.get("inputs", {}).get("bytes", 0) for made in held.generations)
    if files:
        rows.append(("built from", f"{files:,} files, {as_bytes(size)}"))
    rows.append(("generations", f"{len(held.generations)}"))
    return table(("", ""), rows)


def _origin(held: Manifest, stated: About) -> list[str]:
    return [
        "## Origin",
        "",
        f"Licences: {'; '.join(stated.licenses) or 'not stated'}.  ",
        f"Sources: {'; '.join(stated.sources) or 'not stated'}.",
    ]


def _lengths(held: Manifest, sample: Sample) -> list[str]:
    if not len(sample.lengths):
        return []
    quantiles = np.quantile(sample.lengths, QUANTILES, method="inverted_cdf").astype(int)
    total = sum(made.shards for made in held.generations)
    return [
        "## Lengths",
        "",
        f"Tokens of a document, in {len(sample.lengths):,} documents of {sample.shards:,} of "
        f"{total:,} shards. A row says that this share of the documents is not longer.",
        "",
        *table(
            ("share", "tokens"),
            [(f"{q:.0%}", f"{n:,}") for q, n in zip(QUANTILES, quantiles, strict=True)],
        ),
    ]


def _left_out(held: Manifest) -> list[str]:
    counts: Counter[str] = Counter()
    for made in held.generations:
        counts.update(made.provenance.get("counts", {}))
    rows = [(name, f"{count:,}") for name, count in sorted(counts.items()) if count]
    if not rows:
        return []
    return ["## Counts of the build", "", *table(("kind", "count"), rows)]


def _settings(held: Manifest) -> list[str]:
    flat = {key: value for key, value in held.settings.items() if value not in (None, {}, [])}
    if chat := flat.pop("chat", None):
        flat["chat"] = {key: value for key, value in chat.items() if key != "source"}
    if not flat:
        return []
    rows = [(f"`{key}`", f"`{value}`") for key, value in sorted(flat.items())]
    lines = ["## Settings of the build", "", *table(("setting", "value"), rows)]
    if chat:
        lines += ["", "The chat template:", "", "````", chat["source"].rstrip(), "````"]
    return lines


def _field(key: str, sample: Sample) -> list[str]:
    """Describe a kept field: the shares of its values, or the quantiles of its numbers."""
    values = [(fields[key], tokens) for fields, tokens in sample.fields]
    present = [value for value, _ in values if value is not None]
    missing = len(values) - len(present)
    lines = [f"## Field `{key}`", ""]
    lines += [f"Missing in {missing:,} of {len(values):,} documents of the sample.", ""]
    if present and all(type(value) in (int, float) for value in present):
        quantiles = np.quantile(np.array(present, np.float64), QUANTILES)
        numbers = [(f"{q:.0%}", f"{n:.6g}") for q, n in zip(QUANTILES, quantiles, strict=True)]
        return lines + table(("share of documents", "not above"), numbers)
    documents: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for value, count in values:
        if value is not None:
            documents[str(value)] += 1
            tokens[str(value)] += count
    total = max(1, sum(tokens.values()))
    rows = [
        (value, f"{count / max(1, len(present)):.2%}", f"{tokens[value] / total:.2%}")
        for value, count in documents.most_common(MOST_VALUES)
    ]
    if len(documents) > MOST_VALUES:
        lines += [f"The {MOST_VALUES} most frequent of {len(documents):,} values.", ""]
    return lines + table(("value", "documents", "tokens"), rows)
