"""Bytes per token of a run's sources: a loss in nats per token becomes bits per byte.

The bytes per token of a source are those of its dataset: of all its tokens, or of SPANS spans of it
if it is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....console.errors import UserError
from ....dataplane import tokenizers
from ....dataplane.datasets.dataset import Dataset
from ....dataplane.order.plan import PlanSource
from .chunks import Chunk

SPANS, SPAN_TOKENS = 256, 8192

BytesPerToken = dict[str, float]
"""Bytes per token of each source, by name."""


@dataclass(frozen=True)
class ByteSizes:
    trained: BytesPerToken
    held_out: BytesPerToken

    @classmethod
    def measured(cls, trained: Iterable[PlanSource], held_out: Iterable[PlanSource]) -> ByteSizes:
        return cls(bytes_per_token(trained), bytes_per_token(held_out))


def convert(chunk: Chunk, sizes: BytesPerToken) -> None:
    """Replace the losses of a chunk by bits per byte."""
    tokens, octets = np.zeros(len(chunk)), np.zeros(len(chunk))
    for name, size in sizes.items():
        weight = np.nan_to_num(chunk[f"weight/{name}"])
        tokens, octets = tokens + weight, octets + weight * size
        if f"loss/{name}" in chunk.columns:
            chunk.columns[f"loss/{name}"] = chunk[f"loss/{name}"] / math.log(2) / size
    if "loss" in chunk.columns:
        with np.errstate(invalid="ignore", divide="ignore"):
            chunk.columns["loss"] = chunk["loss"] / math.log(2) / (octets / tokens)


def converted(entry: dict[str, Any], sizes: BytesPerToken) -> dict[str, Any]:
    """Return a line of metrics or of evaluations with its losses in bits per byte."""
    sources = entry["sources"]
    tokens = sum(source["weight"] for source in sources.values())
    octets = sum(source["weight"] * sizes[name] for name, source in sources.items())
    return {
        **entry,
        "loss": _bits(entry["loss"], octets / tokens if tokens else math.nan),
        "sources": {
            name: {**source, "loss": _bits(source["loss"], sizes[name])}
            for name, source in sources.items()
        },
    }


def bits_per_byte(nats: float, size: float) -> float:
    """Return a loss per token in bits per byte; `size` is the bytes of a token."""
    return nats / math.log(2) / size


def _bits(nats: float | None, size: float) -> float | None:
    return None if nats is None else bits_per_byte(nats, size)


def bytes_per_token(sources: Iterable[PlanSource]) -> BytesPerToken:
    """Return the bytes per token of each source's dataset."""
    return {source.name: measure(source.url) for source in sources}


def measure(url: str) -> float:
    """Return the mean bytes of a dataset's tokens; the ends of documents have none."""
    dataset = Dataset(url)
    sizes = tokenizers.load(dataset.manifest.tokenizer, url).byte_sizes()
    total = int(dataset.shard_tokens[-1])
    length = total if total <= SPANS * SPAN_TOKENS else SPAN_TOKENS
    starts = np.unique(np.linspace(0, total - length, SPANS).astype(np.int64))
    octets = 0
    ids = np.empty(length, dataset.manifest.dtype)
    for start in starts.tolist():
        dataset.fill(start, ids)
        octets += int(sizes[ids].sum())
    if not octets:
        raise UserError(f"the tokens of {url} have no bytes")
    return octets / (len(starts) * length)


def mean_loss(entries: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean of the known losses."""
    known = [entry["loss"] for entry in entries if entry["loss"] is not None]
    return sum(known) / len(known) if known else None
