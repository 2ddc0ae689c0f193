"""Small datasets and plans for tests, written without any tokenizer."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.console import config
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.chunks import ChunkHasher
from headrace.dataplane.datasets.manifest import Manifest, Shard, TokenizerInfo
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.shards import shard_format
from headrace.dataplane.shards.documents import ShardDocuments
from headrace.dataplane.storage import storage
from headrace.mixtures.mixture_file.mixture import Mixture
from headrace.mixtures.planning.resolve_mixture import resolve

END = 0
VOCABULARY = 512


def random_documents(seed: int, count: int, *, longest: int = 400) -> list[np.ndarray]:
    """Return documents of ids in [1, 512), each ending with END."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, count)
    return [
        np.append(rng.integers(1, VOCABULARY, length - 1), END).astype(np.uint16)
        for length in lengths
    ]


def write_dataset(
    url: str,
    documents: Sequence[np.ndarray],
    *,
    format: str = "arrow",
    shard_documents: int = 50,
    codes: Sequence[np.ndarray] | None = None,
    weight_table: tuple[float, ...] | None = None,
    fingerprint: str = "test",
    ids: bool = True,
) -> Manifest:
    """Append documents to the dataset at `url` as one generation."""
    if storage.exists(storage.join(url, manifests.NAME)):
        manifest = manifests.load(url)
    else:
        tokenizer = TokenizerInfo(
            kind="unknown", fingerprint=fingerprint, vocab_size=VOCABULARY, end_of_document=END
        )
        manifest = Manifest(
            format=format, dtype="uint16", tokenizer=tokenizer, weights=weight_table
        )
    shards = []
    for first in range(0, len(documents), shard_documents):
        part = documents[first : first + shard_documents]
        whole = ShardDocuments(
            tokens=np.concatenate(part),
            starts=np.cumsum([0, *map(len, part)]).astype(np.int64),
            files=(f"corpus-{manifest.documents}.txt",),
            file=np.zeros(len(part), np.int32),
            position=np.arange(first, first + len(part), dtype=np.int64),
            ids=tuple(f"id-{first + number}" for number in range(len(part))) if ids else None,
            weights=None
            if codes is None
            else np.concatenate(codes[first : first + shard_documents]).astype(np.uint8),
        )
        buffer = io.BytesIO()
        shard_format(format).write(buffer, whole)
        data = buffer.getvalue()
        hasher = ChunkHasher()
        hasher.update(data)
        chunks, digest = hasher.finish()
        name = f"shards/{digest[:32]}.{format}"
        storage.write(storage.join(url, name), data)
        shards.append(
            Shard(
                name=name,
                size=len(data),
                documents=len(part),
                tokens=len(whole.tokens),
                hash=digest,
                chunks=chunks,
            )
        )
    manifest = manifest.append(manifests.write_generation(url, shards))
    manifests.save(url, manifest)
    return manifest


def plan_of(spec: dict[str, Any]) -> Plan:
    """Return the plan of a mixture, given as the data of its YAML."""
    return resolve(config.build(Mixture, spec, source="a test's mixture"))


def threads_of_loaders(patience: float) -> list[threading.Thread]:
    """Return the threads of loaders that still run after so many seconds: a closed loader does not
    wait for its fetches."""
    deadline = time.monotonic() + patience
    threads = [item for item in threading.enumerate() if item.name.startswith("headrace-")]
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in threads if thread.is_alive()]
