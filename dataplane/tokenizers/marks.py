"""Texts with special-token spans, and with spans that are not learnt.

A special token's name in a text is plain text. What a build itself inserts (a chat template's
turns, fill-in-the-middle sentinels) is marked by position instead, so no corpus can imitate it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Int64
from .tokenizer import Encoded, TextError, Tokenizer

NO_TOKEN = -1
WEIGHT_TABLE = (1.0, 0.0)
"""Loss-weight table: learnt tokens, then tokens that are not learnt."""
MASKED_CODE = 1
"""Weight code of tokens that are not learnt."""


@dataclass(frozen=True)
class TextSpans:
    """Special-token spans and learnt spans in a text."""

    special: tuple[tuple[int, int, int], ...] = ()
    """Text spans [start, end), possibly empty, and the ids that replace them. NO_TOKEN: no id, but
    no token crosses the span."""
    learnt: tuple[tuple[int, int], ...] | None = None
    """Learnt spans, in order; None: the whole document."""


def split_plain_text(text: str, spans: TextSpans) -> list[str]:
    """Return the plain text before, between and after special-token spans."""
    edges = [0]
    for start, end, _ in spans.special:
        edges += [start, end]
    edges.append(len(text))
    return [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def encode(tokenizer: Tokenizer, texts: Sequence[str], text_spans: Sequence[TextSpans]) -> Encoded:
    """Encode texts with special-token spans. Plain parts are encoded separately; the tokenizer ends
    a part with an end-of-document id, which is replaced by the special id after the part. A special
    span at the end of a text, with the end-of-document id, is the document's end."""
    end = tokenizer.info.end_of_document
    assert end is not None
    plain: list[str] = []
    ids: list[int] = []
    end_parts: list[int] = []  # parts up to the end of each text
    for text, spans in zip(texts, text_spans, strict=True):
        text_plain = split_plain_text(text, spans)
        special = [id for _, _, id in spans.special]
        if special and special[-1] == end and not text_plain[-1]:
            del text_plain[-1], special[-1]
        plain += text_plain
        ids += [*special, end]
        end_parts.append(len(plain))
    try:
        encoded = tokenizer.encode(plain)
    except TextError as error:
        raise TextError(bisect_right(end_parts, error.number), error.why) from None
    ends = encoded.starts[1:] - 1
    end_ids = np.array(ids, np.int64)
    is_kept = np.ones(len(encoded.tokens), bool)
    is_kept[ends] = end_ids != NO_TOKEN
    tokens = encoded.tokens.copy()
    tokens[ends[end_ids != NO_TOKEN]] = end_ids[end_ids != NO_TOKEN]
    bounds = encoded.starts[[0, *end_parts]]
    weights = encoded.weights
    if any(spans.learnt is not None for spans in text_spans):
        assert weights is None  # genomes have weights, and no spans
        token_spans = _locate_in_texts(
            tokenizer.spans(plain, encoded), encoded.starts, texts, text_spans, end_parts
        )
        weights = _weight_codes(token_spans, bounds, texts, text_spans)
    return Encoded(
        tokens[is_kept],
        np.concatenate([[0], np.cumsum(is_kept)])[bounds],
        None if weights is None else weights[is_kept],
    )


def _locate_in_texts(
    spans: Int64,
    starts: Int64,
    texts: Sequence[str],
    text_spans: Sequence[TextSpans],
    end_parts: Sequence[int],
) -> Int64:
    """Convert byte spans in plain parts [ids, 2] into byte spans in the texts, special tokens
    included."""
    bases: list[int] = []  # of each plain part, in its text
    special: list[tuple[int, int]] = []  # after each plain part
    for text, spans_in_text, end_part in zip(texts, text_spans, end_parts, strict=True):
        edges = [position for start, end, _ in spans_in_text.special for position in (start, end)]
        bounds = _byte_positions(text, [*edges, len(text), len(text)])
        # Without the plain part after a special token that ends the document.
        num_parts = end_part - len(bases)
        bases += [0, *bounds[1::2]][:num_parts]
        special += list(zip(bounds[::2], bounds[1::2], strict=True))[:num_parts]
    spans = spans + np.repeat(np.array(bases, np.int64), np.diff(starts))[:, None]
    spans[starts[1:] - 1] = special
    return spans


def _weight_codes(
    spans: Int64, id_bounds: Int64, texts: Sequence[str], text_spans: Sequence[TextSpans]
) -> npt.NDArray[np.uint8]:
    """Return weight codes [ids]. An id is learnt if its span overlaps a learnt span."""
    weights = np.full(len(spans), MASKED_CODE, np.uint8)
    for index, (text, learnt_spans) in enumerate(zip(texts, text_spans, strict=True)):
        first_id, end_id = id_bounds[index : index + 2].tolist()
        if learnt_spans.learnt is None:
            weights[first_id:end_id] = 0
            continue
        starts, ends = spans[first_id:end_id].T
        edges = [position for span in learnt_spans.learnt for position in span]
        bounds = _byte_positions(text, edges)
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            first = int(np.searchsorted(ends, start, "right"))
            stop = int(np.searchsorted(starts, end, "left"))
            weights[first_id + first : first_id + stop] = 0
    return weights


def _byte_positions(text: str, positions: Sequence[int]) -> list[int]:
    """Convert non-decreasing character positions into UTF-8 byte positions."""
    if text.isascii():
        return list(positions)
    byte_positions, previous, size = [], 0, 0
    for position in positions:
        size += len(text[previous:position].encode())
        previous = position
        byte_positions.append(size)
    return byte_positions
