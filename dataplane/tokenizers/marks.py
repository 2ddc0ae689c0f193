"""Texts of which some parts are special tokens, and some are not learnt.

A name of a special token in a text is plain text. What a build itself puts into documents (the
turns of a chat template, the sentinels of fill-in-the-middle) is marked by its place instead, so no
text of a corpus can imitate it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .tokenizer import Encoded, TextError, Tokenizer

CUT = -1
WEIGHTS = (1.0, 0.0)
"""Loss weights of tokens that are learnt, and of those that are not: a dataset's table."""
MASKED = 1
"""Index of the latter."""


@dataclass(frozen=True)
class Marks:
    """The special parts of a text, by their places."""

    special: tuple[tuple[int, int, int], ...] = ()
    """Parts [start, end) of the text, which may be empty, and the id that stands for each. CUT: no
    id does, and no token crosses the place."""
    learnt: tuple[tuple[int, int], ...] | None = None
    """Parts that are learnt, in their order; None: the whole document."""


def plain_parts(text: str, marks: Marks) -> list[str]:
    """Return the parts of a text before, between and after its special ones."""
    edges = [0, *(place for start, end, _ in marks.special for place in (start, end)), len(text)]
    return [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]


def encode(tokenizer: Tokenizer, texts: Sequence[str], marks: Sequence[Marks]) -> Encoded:
    """Encode texts with marks. The plain parts of a text are encoded by themselves; the tokenizer
    reserves an id at the end of each, which becomes the id of the special part after it. A special
    part that ends the text, and is the token that ends documents, is the end of the document."""
    end = tokenizer.info.end_of_document
    assert end is not None
    parts: list[str] = []
    ids: list[int] = []
    last: list[int] = []  # parts up to the end of each text
    for text, mark in zip(texts, marks, strict=True):
        plain = plain_parts(text, mark)
        special = [id for _, _, id in mark.special]
        if special and special[-1] == end and not plain[-1]:
            del plain[-1], special[-1]
        parts += plain
        ids += [*special, end]
        last.append(len(parts))
    try:
        encoded = tokenizer.encode(parts)
    except TextError as error:
        raise TextError(bisect_right(last, error.number), error.why) from None
    ends = encoded.starts[1:] - 1
    id_of = np.array(ids, np.int64)
    kept = np.ones(len(encoded.tokens), bool)
    kept[ends] = id_of != CUT
    tokens = encoded.tokens.copy()
    tokens[ends[id_of != CUT]] = id_of[id_of != CUT]
    bounds = encoded.starts[[0, *last]]
    weights = encoded.weights
    if any(mark.learnt is not None for mark in marks):
        assert weights is None  # genomes have weights of their own, and no marks
        spans = _spans_in_texts(tokenizer.spans(parts, encoded), encoded.starts, texts, marks, last)
        weights = _weights(spans, bounds, texts, marks)
    return Encoded(
        tokens[kept],
        np.concatenate([[0], np.cumsum(kept)])[bounds],
        None if weights is None else weights[kept],
    )


def _spans_in_texts(
    spans: Int64, starts: Int64, texts: Sequence[str], marks: Sequence[Marks], last: Sequence[int]
) -> Int64:
    """Turn spans in plain parts into spans in the texts, and give special tokens theirs."""
    bases: list[int] = []  # of each plain part, in its text
    special: list[tuple[int, int]] = []  # after each plain part
    for text, mark, end in zip(texts, marks, last, strict=True):
        edges = [place for start, stop, _ in mark.special for place in (start, stop)]
        places = _in_bytes(text, [*edges, len(text), len(text)])
        count = end - len(bases)  # without the plain part after an end that is the document's
        bases += [0, *places[1::2]][:count]
        special += list(zip(places[::2], places[1::2], strict=True))[:count]
    spans = spans + np.repeat(np.array(bases, np.int64), np.diff(starts))[:, None]
    spans[starts[1:] - 1] = special
    return spans


def _weights(
    spans: Int64, bounds: Int64, texts: Sequence[str], marks: Sequence[Marks]
) -> npt.NDArray[np.uint8]:
    """Return the code of each id. An id is learnt if a part of what it stands for is."""
    weights = np.full(len(spans), MASKED, np.uint8)
    for number, (text, mark) in enumerate(zip(texts, marks, strict=True)):
        first, last = bounds[number : number + 2].tolist()
        if mark.learnt is None:
            weights[first:last] = 0
            continue
        begins, ends = spans[first:last].T
        places = _in_bytes(text, [place for part in mark.learnt for place in part])
        for begin, end in zip(places[::2], places[1::2], strict=True):
            low, high = np.searchsorted(ends, begin, "right"), np.searchsorted(begins, end, "left")
            weights[first + int(low) : first + int(high)] = 0
    return weights


def _in_bytes(text: str, places: Sequence[int]) -> list[int]:
    """Return places of a text, which do not decrease, in bytes of UTF-8."""
    if text.isascii():
        return list(places)
    found, at, size = [], 0, 0
    for place in places:
        size += len(text[at:place].encode())
        at = place
        found.append(size)
    return found
