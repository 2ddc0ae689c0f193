"""Texts whose special tokens have places: those that a build itself puts into documents.

A name of a special token in a text is plain text. What a build adds (the sentinels of
fill-in-the-middle) is marked by its place instead, so no text of a corpus can imitate it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .tokenizer import Encoded, TextError, Tokenizer

CUT = -1


@dataclass(frozen=True)
class Marks:
    """Places of a text that are not plain text."""

    special: tuple[tuple[int, int, int], ...] = ()
    """Parts [start, end) of the text, which may be empty, and the id that stands for each. CUT: no
    id does, and no token crosses the place."""


def encode(tokenizer: Tokenizer, texts: Sequence[str], marks: Sequence[Marks]) -> Encoded:
    """Encode texts with marks. The plain parts between marked places are encoded by themselves;
    the tokenizer reserves an id at the end of each, which becomes the id of the place."""
    end = tokenizer.info.end_of_document
    assert end is not None
    parts: list[str] = []
    ids: list[int] = []
    last: list[int] = []  # parts up to the end of each text
    for text, mark in zip(texts, marks, strict=True):
        at = 0
        for start, stop, id in mark.special:
            parts.append(text[at:start])
            ids.append(id)
            at = stop
        parts.append(text[at:])
        ids.append(end)
        last.append(len(parts))
    try:
        encoded = tokenizer.encode(parts)
    except TextError as error:
        raise TextError(bisect_right(last, error.number), error.why) from None
    places = encoded.starts[1:] - 1
    kept = np.ones(len(encoded.tokens), bool)
    kept[places] = cut = np.array(ids, np.int64) != CUT
    tokens = encoded.tokens.copy()
    tokens[places[cut]] = np.array(ids, np.int64)[cut]
    numbers = np.concatenate([[0], np.cumsum(kept)])
    return Encoded(
        tokens[kept],
        numbers[encoded.starts[[0, *last]]],
        None if encoded.weights is None else encoded.weights[kept],
    )
