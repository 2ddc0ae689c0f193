"""Bytes per token of a run's sources: a loss in nats per token becomes bits per byte.

The bytes per token of a source are those of its dataset: of all its tokens, or of SPANS spans of it
if it is large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...console.errors import UserError
from ...dataplane import tokenizers
from ...dataplane.arrays import Float64
from ...dataplane.datasets import packing
from ...dataplane.datasets.dataset import Dataset

SPANS, SPAN_TOKENS = 256, 8192

NATS = "nats per token"
BITS = "bits per byte"
CONVERTED = (
    "These runs have different tokenizers: losses are in bits per byte of text, with the bytes per "
    "token of each source's dataset."
)
INCOMPARABLE = (
    "These runs have different tokenizers, and bits per byte need their datasets ({}). Losses in "
    "nats per token of different tokenizers cannot be compared."
)
APART = f"{NATS}, of different tokenizers"
"""Unit of losses that cannot be compared."""

BytesPerToken = dict[str, float]
"""Bytes per token of each source, by name."""


@dataclass(frozen=True)
class ByteSizes:
    trained: BytesPerToken
    held_out: BytesPerToken

    @classmethod
    def measured(cls, trained: Mapping[str, str], held_out: Mapping[str, str]) -> ByteSizes:
        """Read them from datasets at URLs, by source."""
        return cls(bytes_per_token(trained), bytes_per_token(held_out))


def bits_per_nat(
    weights: Mapping[str, Float64], sizes: BytesPerToken
) -> dict[str, Float64 | float]:
    """Return, for each curve of losses, the factors that turn nats per token into bits per byte.
    `weights` are the loss weights of each source in each step, NaN for none."""
    known = {name: np.nan_to_num(weight) for name, weight in weights.items()}
    tokens = sum(known.values())
    octets = sum(weight * sizes[name] for name, weight in known.items())
    with np.errstate(invalid="ignore", divide="ignore"):
        overall: Float64 = np.divide(tokens, octets) / math.log(2)
    return {"loss": overall, **{f"loss/{name}": bits_per_byte(1.0, sizes[name]) for name in sizes}}


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


def bytes_per_token(urls: Mapping[str, str]) -> BytesPerToken:
    """Return the bytes per token of datasets, by source."""
    return {name: measure(url) for name, url in urls.items()}


def measure(url: str) -> float:
    """Return the mean bytes of a dataset's tokens; the ends of documents have none. Padding does
    not count: no loss has it."""
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
    padding = packing.padding_of(dataset.manifest) / total
    return octets / (len(starts) * length) / (1 - padding)


def mean_loss(entries: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean of the known losses."""
    known = [entry["loss"] for entry in entries if entry["loss"] is not None]
    return sum(known) / len(known) if known else None
