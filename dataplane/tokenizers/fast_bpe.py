r"""Byte-level BPE through fastokens, for tokenizers where its ids equal those from `tokenizers`.

fastokens splits texts by vector instructions and caches word ids; it is more than ten times as fast
as `tokenizers`. The ids are equal under three conditions, which are all checked:

1. Merges. fastokens joins the pair whose union has the lowest id; `tokenizers` joins pairs by their
   place in a list, which may hold several pairs per token. fastokens receives one merge per token,
   and the tokens numbered in the order in which merges produce them: by their own ids, if these
   have that order. The two agree if every token, encoded alone, ends with a pair listed for the
   token, and if these pairs are listed in token order (`_find_last_merges` checks both). Proof: if
   the two ever differed, at a pair (x, y) that is not listed although xy is a token, or that is
   listed elsewhere, then the token xy alone would end with that pair as well.
2. The pattern that splits texts into words (patterns.py).
3. Character classes. The libraries have different tables for \s, \p{L} and \p{N};
   `tests/dataplane/tokenizers/test_words.py` compares words for every Unicode character.

Tokens are spelled as in a tokenizer's file: a letter stands for a byte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from .patterns import Pattern, find_pattern, format_pre_tokenizer
from .tokenizer import id_type

BATCH_CHARACTERS = 1 << 19
"""Characters per call."""
THREADS = "FASTOKENS_BPE_THREADS"
"""Environment variable for fastokens: a thread per process, because a build has a process per
core."""
PLACEHOLDER = "\u2581"
"""Begins names of ids without a token: no text is spelled with it."""

Pair = tuple[str, str]
"""The two tokens joined by a merge."""


class Inexact(Exception):
    """Conversion would change ids; the message is the reason."""


class FastBpe:
    """A fastokens tokenizer with the same ids as a `tokenizers` tokenizer."""

    splittable = True
    """Parts of a text are encoded as they are in the text."""

    def __init__(self, merges: Mapping[str, Pair], ids: npt.NDArray[Any], pattern: Pattern) -> None:
        """`merges` maps tokens to their last merge; `ids` has the ids of bytes, then tokens."""
        self._merges, self._ids, self._pattern = merges, ids, pattern
        numbers = ids.astype(np.int64)
        self._is_ordered = bool((np.diff(numbers[256:]) > 0).all()) and (
            len(np.unique(numbers)) == len(numbers)
        )

    @cached_property
    def _tokenizer(self) -> Any:
        """The fastokens tokenizer. Building it takes as long as `tokenizers` for 1 MB of text."""
        os.environ.setdefault(THREADS, "1")
        from fastokens import Tokenizer

        spellings = [*_alphabet(), *self._merges]
        numbers = self._ids.tolist() if self._is_ordered else range(len(spellings))
        vocabulary = dict(zip(spellings, numbers, strict=True))
        missing = set(range(max(numbers))).difference(numbers)
        vocabulary |= {f"{PLACEHOLDER}{number}": number for number in missing}
        unused = ("normalizer", "post_processor", "decoder", "truncation", "padding")
        content: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": format_pre_tokenizer(self._pattern),
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": list(map(" ".join, self._merges.values())),  # faster than pairs
            },
            **dict.fromkeys(unused),
        }
        return Tokenizer.from_json_str(to_json(content).decode())

    def needs_library(self, text: str) -> bool:
        """Return True if the libraries may split a text into different words."""
        return any(string in text for string in self._pattern.exceptions)

    def encode(
        self, texts: Sequence[str], end_id: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the ids of all texts, with `end_id` after every text, and end offsets [texts]."""
        numbers, end_bytes = self._tokenizer.encode_batch_flat(list(texts))
        ends = np.frombuffer(end_bytes, np.int64)[1:]
        ids = np.frombuffer(numbers, np.uint32)
        ids = ids.astype(self._ids.dtype) if self._is_ordered else self._ids[ids]
        return np.insert(ids, ends, end_id), ends + np.arange(1, len(ends) + 1)


def convert(tokenizer: Mapping[str, Any]) -> FastBpe:
    """Convert a tokenizer, from JSON content; raise Inexact if ids may differ."""
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE":
        raise Inexact(f"its model is {model['type']}, not BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise Inexact(f"its model sets {key}")
    if model.get("byte_fallback"):
        raise Inexact("its model falls back to bytes")
    if tokenizer.get("normalizer") is not None:
        kind = tokenizer["normalizer"].get("type")
        if kind != "NFC":
            raise Inexact(f"it normalizes texts ({kind})")
    pattern = find_pattern(tokenizer.get("pre_tokenizer"))
    if isinstance(pattern, str):
        raise Inexact(pattern)
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    merges, ids = _read_merges(model, added.keys())
    size = 1 + max(*model["vocab"].values(), *added.values())
    return FastBpe(merges, np.array(ids, id_type(size)), pattern)


def _read_merges(model: dict[str, Any], added: Set[str]) -> tuple[dict[str, Pair], list[int]]:
    """Return last merges by token, in order, and the ids of all bytes and tokens."""
    vocabulary: dict[str, int] = model["vocab"]
    letters = _alphabet()
    if missing := [byte for byte, letter in enumerate(letters) if letter not in vocabulary]:
        raise Inexact(f"it has no token for the byte {missing[0]:#x}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    ids = [vocabulary[letter] for letter in letters]
    merge_lines: dict[str, dict[Pair, int]] = {}
    for line, (first, second) in enumerate(merges):
        token = first + second
        lines = merge_lines.get(token)
        if lines is None:
            lines = merge_lines[token] = {}
            ids.append(vocabulary[token])
        lines[first, second] = line
    if unknown := set("".join(merge_lines)).difference(letters):
        raise Inexact(f"its merges have the letter {min(unknown)!r}, which encodes no byte")
    ranks = {letter: byte for byte, letter in enumerate(letters)}
    ranks |= {token: rank for rank, token in enumerate(merge_lines, start=256)}
    last_merges = _find_last_merges(merge_lines, ranks)
    if model.get("ignore_merges"):
        # The caller handles added tokens (see `decode_token`).
        for spelling in vocabulary.keys() - added - ranks.keys():
            if set(spelling).issubset(letters):
                raise Inexact(f"its token {spelling!r} is produced by no merge")
    return last_merges, ids


def _find_last_merges(
    merge_lines: Mapping[str, Mapping[Pair, int]], ranks: Mapping[str, int]
) -> dict[str, Pair]:
    """Return the last pair joined when a token is encoded alone, by token; raise Inexact unless the
    pair is listed for the token, in token order. `merge_lines` has the line of every listed
    pair."""
    last_line, merges = -1, dict[str, Pair]()
    tokens = [*_alphabet(), *merge_lines]
    halves = [(byte, byte) for byte in range(256)]
    for rank, (token, lines_by_pair) in enumerate(merge_lines.items(), start=256):
        for pair in lines_by_pair:
            first, second = ranks.get(pair[0], rank), ranks.get(pair[1], rank)
            if first < rank > second and _is_last(first, second, halves, tokens, ranks):
                break
        else:
            raise Inexact(f"its merges never produce the token {token!r} by a listed pair")
        merges[token] = pair
        halves.append((first, second))
        line = lines_by_pair[pair]
        if line < last_line:
            raise Inexact(f"its merges into {token!r} are not listed together")
        last_line = line
    return merges


def _is_last(
    first: int,
    second: int,
    halves: Sequence[tuple[int, int]],
    tokens: Sequence[str],
    ranks: Mapping[str, int],
) -> bool:
    """Return True if both halves, side by side, are produced before anything joins across them.

    Halves are ranks, and produced in rank order, because a token ranks above its halves. Going back
    in time, two tokens meet at the boundary until the higher-ranked token is divided; between equal
    tokens, the left one is produced first. Their union must rank after that time. The first 256
    ranks are bytes, which are not divided.
    """
    while first > 255 or second > 255:
        if first > second:
            time, first = first, halves[first][1]
        else:
            time, second = second + 1, halves[second][0]
        if ranks.get(tokens[first] + tokens[second], time) < time:
            return False
    return True


def decode_token(token: str) -> str | None:
    """Decode a byte-level token to text, or None if it is not valid UTF-8."""
    octets = {letter: byte for byte, letter in letters_by_byte().items()}
    if any(letter not in octets for letter in token):
        return None
    try:
        return bytes(octets[letter] for letter in token).decode()
    except UnicodeDecodeError:
        return None


@cache
def letters_by_byte() -> dict[int, str]:
    """Return the letters for bytes in byte-level vocabularies: the byte's character if it is
    printable, else the next character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(unprintable)
    }


@cache
def _alphabet() -> tuple[str, ...]:
    """Return the letters of the bytes 0 to 255."""
    letters = letters_by_byte()
    return tuple(letters[byte] for byte in range(256))
