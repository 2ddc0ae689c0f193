"""Ids as text, with brackets around parts that are not learnt, or learnt with another weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .tokenizer import Tokenizer


def bracketed(tokenizer: Tokenizer, ids: Sequence[int], weights: Sequence[float]) -> str:
    """Decode ids. Parts whose loss weight is not 1 get brackets: ⟦…⟧ without a loss, ⟦0.1:…⟧ with
    another weight."""
    parts = []
    for weight, run in groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1]):
        shown = tokenizer.decode([id for id, _ in run])
        label = f"{weight:g}:" if weight else ""
        parts.append(shown if weight == 1 else f"⟦{label}{shown}⟧")
    return "".join(parts)
