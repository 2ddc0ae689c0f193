"""A sample of a dataset: lengths, bytes of a token, loss weights and fields of some shards."""

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

SHARDS = 32
"""Shards of the sample."""
DOCUMENTS = 2048
"""Documents of a shard whose fields are counted."""
TOKENS = 1 << 18
"""Tokens of a shard whose bytes are counted."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Shares of the documents for which cards give the largest length or number."""


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

    @property
    def bytes_of_token(self) -> float | None:
        """Bytes of text of a token on average; None if they are unknown."""
        return self.bytes / self.tokens if self.bytes and self.tokens else None

    @property
    def length_quantiles(self) -> list[int]:
        """The length that each share of QUANTILES does not exceed; nothing without documents."""
        if not len(self.lengths):
            return []
        found = np.quantile(self.lengths, QUANTILES, method="inverted_cdf")
        return [int(length) for length in found]


def sample_of(url: str, generations: int | None = None) -> Sample:
    """Count the lengths, bytes and fields of up to SHARDS shards, spread over a dataset or over its
    first generations."""
    dataset = Dataset(url, generations=generations)
    held, count = dataset.manifest, len(dataset.shard_tokens) - 1
    sample = Sample()
    sizes = None
    try:
        sizes = tokenizers.load(held.tokenizer, url).byte_sizes()
    except UserError:  # an indexed dataset may name no tokenizer
        sample.bytes = None
    lengths = [sample.lengths]
    for number in np.unique(np.linspace(0, count - 1, min(SHARDS, count)).astype(int)).tolist():
        start, end = (int(token) for token in dataset.shard_tokens[number : number + 2])
        lengths.append(dataset.open_shard(number).layout.document_tokens)
        if sizes is not None and sample.bytes is not None:
            ids = np.empty(min(TOKENS, end - start), np.int64)
            dataset.fill(start, ids)
            if packing.length_of(held) is not None:  # padding has no text
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
            rows = dataset.fields(first, first + min(DOCUMENTS, len(lengths[-1])))
            sample.fields += zip(rows, lengths[-1].tolist(), strict=False)
        sample.shards += 1
    sample.lengths = np.concatenate(lengths)
    return sample
