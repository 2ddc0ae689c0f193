"""A dataset for humans: what it is, what it came from, and its documents as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..console.errors import InputError
from ..console.progress import human
from ..dataplane import manifest, storage, tokenizers
from ..dataplane.manifest import Manifest, Shard
from ..dataplane.shards import Origin, shard_format


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
        f"documents end with {info.end_of_document}",
        f"  hash {found.hash}",
    ]
    if found.weights is not None:
        lines.append(f"  loss weights {', '.join(map(str, found.weights))}")
    for number, made in enumerate(found.generations):
        lines.append(
            f"  generation {number}: {made.documents:,} documents, {human(made.tokens)} tokens, "
            f"{human(made.size)}B in {made.shards} shards"
        )
        inputs = made.provenance.get("inputs", {})
        if inputs:
            lines.append(f"    from {inputs['files']} files, {human(inputs['bytes'])}B")
        for name, count in made.provenance.get("counts", {}).items():
            lines.append(f"    {name}: {count:,}")
    return "\n".join(lines)


def document(url: str, number: int) -> tuple[Origin, list[int]]:
    """Where the document `number` of a dataset came from, and its ids."""
    found = manifest.load(url)
    if not 0 <= number < found.documents:
        raise InputError(f"{url} has {found.documents} documents: no number {number}")
    for generation in found.generations:
        if number >= generation.documents:
            number -= generation.documents
            continue
        for shard in manifest.load_table(url, generation):
            if number < shard.documents:
                return _document(url, found, shard, number)
            number -= shard.documents
    raise AssertionError("unreachable")


def text(url: str, ids: list[int]) -> str:
    return tokenizers.load(manifest.load(url).tokenizer, url).decode(ids)


def read_shard(url: str, shard: Shard) -> bytes:
    """The bytes of a whole shard, decompressed."""
    if shard.stored_name is None:
        return storage.read(storage.join(url, shard.name))
    import zstandard

    stored = storage.read(storage.join(url, shard.stored_name))
    return zstandard.ZstdDecompressor().decompress(stored, max_output_size=shard.size)


def _document(url: str, found: Manifest, shard: Shard, number: int) -> tuple[Origin, list[int]]:
    data = memoryview(read_shard(url, shard))
    form = shard_format(found.format)

    def read(start: int, end: int) -> bytes:
        return bytes(data[start:end])

    layout = form.layout(read, shard.size, dtype=found.dtype, details=shard.details)
    origin = form.origins(read, shard.size, number, number + 1, details=shard.details)[0]
    at, end = (int(k) for k in layout.document_starts[number : number + 2])
    width = np.dtype(found.dtype).itemsize
    ids: list[int] = []
    while at < end:
        run = int(np.searchsorted(layout.run_tokens, at, side="right")) - 1
        stop = min(end, int(layout.run_tokens[run + 1]))
        start = int(layout.run_bytes[run]) + (at - int(layout.run_tokens[run])) * width
        ids += np.frombuffer(data[start : start + (stop - at) * width], found.dtype).tolist()
        at = stop
    return origin, ids
