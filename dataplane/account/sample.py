"""A sample of a dataset: lengths, bytes per token, loss weights and fields from some shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...console.errors import UserError
from .. import tokenizers
from ..arrays import Int64
from ..datasets import packing
from ..datasets.dataset import Dataset
from ..datasets.open_shard import Padding

MAX_SHARDS = 32
"""Maximum number of shards in a sample."""
MAX_DOCUMENTS = 2048
"""Maximum documents per shard whose fields are counted."""
MAX_TOKENS = 1 << 18
"""Maximum tokens per shard whose bytes are counted."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Quantiles that cards list for lengths and numbers."""


@dataclass
class DatasetSample:
    """Counts over sampled shards."""

    shards: int = 0
    lengths: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """[documents]: tokens per document."""
    tokens: int = 0
    bytes: int | None = 0
    """Bytes of text in `tokens`; None if the tokenizer is unknown."""
    weights: Counter[float] = field(default_factory=Counter)
    """Tokens by loss weight; empty if all weights are 1."""
    fields: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    """Kept fields and number of tokens, by document."""

    @property
    def bytes_of_token(self) -> float | None:
        """Average bytes per token; None if unknown."""
        return self.bytes / self.tokens if self.bytes and self.tokens else None

    @property
    def length_quantiles(self) -> list[int]:
        """Document lengths at QUANTILES; empty without documents."""
        if not len(self.lengths):
            return []
        quantiles = np.quantile(self.lengths, QUANTILES, method="inverted_cdf")
        return [int(length) for length in quantiles]


def take_sample(url: str, generations: int | None = None) -> DatasetSample:
    """Count lengths, bytes and fields in up to MAX_SHARDS shards, spread over a dataset or the
    first generations."""
    dataset = Dataset(url, generations=generations)
    held, count = dataset.manifest, len(dataset.shard_tokens) - 1
    sample = DatasetSample()
    sizes = None
    try:
        sizes = tokenizers.load(held.tokenizer, url).byte_sizes()
    except UserError:  # an indexed dataset may name no tokenizer
        sample.bytes = None
    lengths = [sample.lengths]
    for number in np.unique(np.linspace(0, count - 1, min(MAX_SHARDS, count)).astype(int)).tolist():
        start, end = (int(token) for token in dataset.shard_tokens[number : number + 2])
        lengths.append(dataset.open_shard(number).layout.document_tokens)
        if sizes is not None and sample.bytes is not None:
            ids = np.empty(min(MAX_TOKENS, end - start), np.int64)
            dataset.fill(start, ids)
            if packing.bin_length(held) is not None:  # padding has no text
                codes = np.concatenate(dataset.codes(start, start + len(ids)))
                ids = ids[codes != Padding(held).code]
            sample.tokens += len(ids)
            sample.bytes += int(sizes[ids].sum())
        if dataset.weight_table is not None:
            for codes in dataset.codes(start, end):
                counts = np.bincount(codes, minlength=len(dataset.weight_table)).tolist()
                for weight, tokens in zip(held.weights or (), counts, strict=True):
                    sample.weights[weight] += tokens
        if held.kept_fields:
            first = int(dataset.shard_documents[number])
            rows = dataset.fields(first, first + min(MAX_DOCUMENTS, len(lengths[-1])))
            sample.fields += zip(rows, lengths[-1].tolist(), strict=False)
        sample.shards += 1
    sample.lengths = np.concatenate(lengths)
    return sample
