"""Ids as text, with brackets around what is not learnt, or learnt with another weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .tokenizer import Tokenizer


def format_brackets(tokenizer: Tokenizer, ids: Sequence[int], weights: Sequence[float]) -> str:
    """Decode ids. Brackets enclose text whose loss weight is not 1: ⟦…⟧ without a loss, ⟦0.1:…⟧
    with another weight."""
    pieces = []
    for weight, run in groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1]):
        decoded = tokenizer.decode([id for id, _ in run])
        label = f"{weight:g}:" if weight else ""
        pieces.append(decoded if weight == 1 else f"⟦{label}{decoded}⟧")
    return "".join(pieces)
