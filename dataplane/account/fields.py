"""Kept fields on dataset and mixture cards: document and token shares by value."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np

from ...console.page import table
from .sample import QUANTILES, DatasetSample

MAX_VALUES = 20
"""Maximum number of values that the page lists."""


def describe_field(key: str, sample: DatasetSample, heading: str) -> list[str]:
    """Render a kept field below a heading: shares by value or list element, or quantiles if all
    values are numbers."""
    values = [(fields[key], tokens) for fields, tokens in sample.fields]
    present = [value for value, _ in values if value is not None]
    missing = len(values) - len(present)
    lines = [heading, ""]
    lines += [f"Missing in {missing:,} of {len(values):,} documents of the sample.", ""]
    if present and all(type(value) in (int, float) for value in present):
        integral = all(type(value) is int for value in present)
        method: Literal["inverted_cdf", "linear"] = "inverted_cdf" if integral else "linear"
        quantiles = np.quantile(np.array(present), QUANTILES, method=method).tolist()
        numbers = [
            (f"{share:.0%}", f"{value:,}" if integral else f"{value:.6g}")
            for share, value in zip(QUANTILES, quantiles, strict=True)
        ]
        return lines + table(("share of documents", "not above"), numbers)
    documents: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    total = 0
    for value, count in values:
        if value is not None:
            total += count
            for element in dict.fromkeys(value if isinstance(value, list) else [value]):
                documents[str(element)] += 1
                tokens[str(element)] += count
    total = max(1, total)
    if any(isinstance(value, list) for value in present):
        length = sum(map(len, present)) / len(present)
        note = f"Lists of {length:.3g} elements on average; a document counts for each element."
        lines += [note, ""]
    rows = [
        (value, f"{count / max(1, len(present)):.2%}", f"{tokens[value] / total:.2%}")
        for value, count in documents.most_common(MAX_VALUES)
    ]
    if len(documents) > MAX_VALUES:
        lines += [f"The {MAX_VALUES} most frequent of {len(documents):,} values.", ""]
    return lines + table(("value", "documents", "tokens"), rows)
