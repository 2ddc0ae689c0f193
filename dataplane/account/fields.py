"""Kept fields on the cards of datasets and mixtures: the shares of documents and tokens by their
values."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...console.markdown import table
from .sample import QUANTILES, Sample

MOST_VALUES = 20
"""Values of a field that the page lists."""


def described_field(key: str, sample: Sample, heading: str) -> list[str]:
    """Return the part of a page about a kept field, below a heading: the shares of its values, or
    the quantiles of its numbers."""
    values = [(fields[key], tokens) for fields, tokens in sample.fields]
    present = [value for value, _ in values if value is not None]
    missing = len(values) - len(present)
    lines = [heading, ""]
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
