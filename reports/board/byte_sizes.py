"""Convert losses from nats per token to bits per byte.

A source's bytes per token are measured on its dataset: on all tokens, or on SPANS evenly spaced
spans of a large dataset.
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
"""Unit for losses that cannot be compared."""

BytesPerToken = dict[str, float]
"""Bytes per token by source."""


@dataclass(frozen=True)
class ByteSizes:
    """Bytes per token in a run's training and held-out datasets."""

    trained: BytesPerToken
    held_out: BytesPerToken

    @classmethod
    def measure(cls, trained: Mapping[str, str], held_out: Mapping[str, str]) -> ByteSizes:
        """Measure the datasets whose URLs are given by source."""
        return cls(bytes_per_token(trained), bytes_per_token(held_out))


def bits_per_nat(
    weights: Mapping[str, Float64], sizes: BytesPerToken
) -> dict[str, Float64 | float]:
    """Return factors from nats per token to bits per byte, by loss curve.

    `weights` are the loss weights by source [steps], NaN for none. The factors for `loss` are an
    array [steps]; a source's factor is constant.
    """
    known = {name: np.nan_to_num(weight) for name, weight in weights.items()}
    tokens = sum(known.values())
    num_bytes = sum(weight * sizes[name] for name, weight in known.items())
    with np.errstate(invalid="ignore", divide="ignore"):
        overall: Float64 = np.divide(tokens, num_bytes) / math.log(2)
    return {"loss": overall, **{f"loss/{name}": bits_per_byte(1.0, sizes[name]) for name in sizes}}


def convert_entry(entry: dict[str, Any], sizes: BytesPerToken) -> dict[str, Any]:
    """Return a metrics or evaluation line with losses in bits per byte."""
    sources = entry["sources"]
    tokens = sum(source["weight"] for source in sources.values())
    num_bytes = sum(source["weight"] * sizes[name] for name, source in sources.items())
    return {
        **entry,
        "loss": _bits(entry["loss"], num_bytes / tokens if tokens else math.nan),
        "sources": {
            name: {**source, "loss": _bits(source["loss"], sizes[name])}
            for name, source in sources.items()
        },
    }


def bits_per_byte(nats: float, size: float) -> float:
    """Convert a loss in nats per token; `size` is the mean bytes per token."""
    return nats / math.log(2) / size


def _bits(nats: float | None, size: float) -> float | None:
    return None if nats is None else bits_per_byte(nats, size)


def bytes_per_token(urls: Mapping[str, str]) -> BytesPerToken:
    """Measure the datasets at URLs by source."""
    return {name: measure(url) for name, url in urls.items()}


def measure(url: str) -> float:
    """Return a dataset's mean bytes per token. End-of-document tokens have no bytes; padding is
    excluded, because it has no loss."""
    dataset = Dataset(url)
    sizes = tokenizers.load(dataset.manifest.tokenizer, url).byte_sizes()
    total = int(dataset.shard_tokens[-1])
    length = total if total <= SPANS * SPAN_TOKENS else SPAN_TOKENS
    starts = np.unique(np.linspace(0, total - length, SPANS).astype(np.int64))
    num_bytes = 0
    ids = np.empty(length, dataset.manifest.dtype)
    for start in starts.tolist():
        dataset.fill(start, ids)
        num_bytes += int(sizes[ids].sum())
    if not num_bytes:
        raise UserError(f"the tokens of {url} have no bytes")
    padding = packing.count_padding(dataset.manifest) / total
    return num_bytes / (len(starts) * length) / (1 - padding)


def mean_loss(entries: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean over entries that have a loss; None if no entry has."""
    known = [entry["loss"] for entry in entries if entry["loss"] is not None]
    return sum(known) / len(known) if known else None
