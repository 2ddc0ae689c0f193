r"""Byte-level BPE through fastokens, for tokenizers where its ids equal those from `tokenizers`.

fastokens splits texts by vector instructions and caches word ids; it is more than ten times as fast
as `tokenizers`. The ids are equal under three conditions, which are all checked:

1. Merges. fastokens joins the pair whose union has the lowest id; `tokenizers` joins pairs by their
   place in a list, which may hold several pairs per token. fastokens receives one merge per token,
   and the tokens numbered in the order in which merges produce them: by their own ids, if these
   have that order. The two agree if every token, encoded alone, ends with a pair listed for the
   token, and if these pairs are listed in token order (`find_last_merges` checks both). Proof: if
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
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from .patterns import Pattern, find_pattern, format_pre_tokenizer
from .tokenizer import id_type

THREADS = "FASTOKENS_BPE_THREADS"
"""Environment variable for fastokens: a thread per process, because a build has a process per
core."""
PLACEHOLDER = "\u2581"
"""Begins names of ids without a token: no text is spelled with it."""

ENDS_TEXTS = {
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "end", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
    "special_tokens": {"end": {"id": "end", "ids": [0], "tokens": ["end"]}},
}
"""Post-processor that reserves a place for the end-of-document id after every text."""

Pair = tuple[str, str]
"""The two tokens joined by a merge."""


class Inexact(Exception):
    """Conversion would change ids; the message is the reason."""


class FastBpe:
    """A fastokens tokenizer with the same ids as a `tokenizers` tokenizer."""

    batch_characters = 4 << 20
    """Characters per call: those of a block of the corpus, so that ids need not be joined."""
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
        unused = ("normalizer", "decoder", "truncation", "padding")
        content: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": format_pre_tokenizer(self._pattern),
            "post_processor": ENDS_TEXTS,
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
        return not text.isascii() and self._pattern.has_exception(text)

    def cut_exceptions(self, text: str) -> list[tuple[str, bool]]:
        """Cut a text into parts that have the same ids alone; return the parts, and True for those
        that need the library."""
        return self._pattern.cut_exceptions(text)

    def encode(
        self, texts: Sequence[str], end_id: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the ids of all texts, with `end_id` after every text, and end offsets [texts]."""
        numbers, end_bytes = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=True)
        ends = np.frombuffer(end_bytes, np.int64)[1:]
        ids = np.frombuffer(numbers, np.uint32)
        ids = ids.astype(self._ids.dtype) if self._is_ordered else self._ids[ids]
        ids[ends - 1] = end_id
        return ids, ends


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
    if unknown := set("".join(chain.from_iterable(merges))).difference(letters):
        raise Inexact(f"its merges have the letter {min(unknown)!r}, which encodes no byte")
    last_merges = find_last_merges(merges)
    ids = [vocabulary[token] for token in (*letters, *last_merges)]
    if model.get("ignore_merges"):
        # The caller handles added tokens (see `decode_token`).
        for spelling in vocabulary.keys() - added - last_merges.keys() - set(letters):
            if set(spelling).issubset(letters):
                raise Inexact(f"its token {spelling!r} is produced by no merge")
    return last_merges, ids


def find_last_merges(merges: Sequence[Sequence[str]]) -> dict[str, Pair]:
    """Return the last pair joined when a token is encoded alone, by token, in the order in which
    tokens are listed first; raise Inexact unless the pair is listed for the token, in that order.
    """
    unions = [first + second for first, second in merges]
    tokens = _TokenTable([*_alphabet(), *dict.fromkeys(unions)])
    union, first, second = (
        np.fromiter(map(tokens.ranks.get, parts, repeat(len(tokens.ranks))), np.int64)
        for parts in (unions, *(zip(*merges, strict=True) if merges else ((), ())))
    )
    pair_keys, pair_numbers = np.unique(
        first * (len(tokens.ranks) + 1) + second, return_inverse=True
    )
    last_lines = np.zeros(len(pair_keys), np.int64)
    last_lines[pair_numbers] = np.arange(len(merges))  # of a pair that is listed twice
    lines = np.full(len(tokens.ranks), -1)
    possible = np.flatnonzero((first < union) & (second < union))
    by_length = possible[np.argsort(tokens.lengths[union[possible]], kind="stable")]
    edges = np.flatnonzero(np.diff(tokens.lengths[union[by_length]])) + 1
    for candidates in np.split(by_length, edges):  # halves are shorter than their union
        is_last = tokens.are_last(first[candidates], second[candidates])
        candidates = candidates[is_last]
        ranks, indices = np.unique(union[candidates], return_index=True)
        lines[ranks] = candidates[indices]
        tokens.halves[ranks] = np.stack([first[lines[ranks]], second[lines[ranks]]], axis=1)
    names = list(tokens.ranks)
    is_missing = lines[256:] < 0
    sorted_lines = np.where(is_missing, -1, last_lines[pair_numbers[lines[256:]]])
    is_apart = np.append(False, np.diff(sorted_lines) < 0)
    for index in np.flatnonzero(is_missing | is_apart)[:1] + 256:
        if lines[index] < 0:
            raise Inexact(f"its merges never produce the token {names[index]!r} by a listed pair")
        raise Inexact(f"its merges into {names[index]!r} are not listed together")
    pairs = [merges[line] for line in lines[256:].tolist()]
    return {token: (pair[0], pair[1]) for token, pair in zip(names[256:], pairs, strict=True)}


class _TokenTable:
    """Tokens by rank, and the rank of the union of any two: tokens are compared by their hash."""

    BASE = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self, tokens: Sequence[str]) -> None:
        self.ranks = {token: rank for rank, token in enumerate(tokens)}
        self.lengths = np.fromiter(map(len, tokens), np.int64)
        self.halves = np.zeros((len(tokens), 2), np.int64)
        """[tokens, 2] Ranks of the pair that is joined last."""
        powers = np.full(int(self.lengths.max()) + 1, self.BASE)
        powers[0] = 1
        powers = np.cumprod(powers)
        letters = np.frombuffer("".join(tokens).encode("utf-32-le"), "<u4").astype(np.uint64)
        ends = np.cumsum(self.lengths)
        letters_after = np.repeat(ends, self.lengths) - 1 - np.arange(len(letters))
        self._hashes = np.add.reduceat(letters * powers[letters_after], ends - self.lengths)
        self._scales = powers[self.lengths]
        self._order = np.argsort(self._hashes)
        self._sorted = self._hashes[self._order]
        if (self._sorted[1:] == self._sorted[:-1]).any():
            raise Inexact("two of its tokens have the same hash")

    def are_last(self, first: Any, second: Any) -> npt.NDArray[np.bool_]:
        """Return, for pairs of ranks, if both halves, side by side, are produced before anything
        joins across them.

        Halves are produced in rank order, because a token ranks above its halves. Going back in
        time, two tokens meet at the boundary until the higher-ranked token is divided; between
        equal tokens, the left one is produced first. Their union must rank after that time. The
        first 256 ranks are bytes, which are not divided.
        """
        are_last = np.ones(len(first), bool)
        pairs = np.arange(len(first))
        while True:
            is_divisible = (first > 255) | (second > 255)
            pairs, first, second = pairs[is_divisible], first[is_divisible], second[is_divisible]
            if not len(pairs):
                return are_last
            is_larger = first > second
            time = np.where(is_larger, first, second + 1)
            first, second = (
                np.where(is_larger, self.halves[first, 1], first),
                np.where(is_larger, second, self.halves[second, 0]),
            )
            is_late = self._find_unions(first, second, time) >= time
            are_last[pairs[~is_late]] = False
            pairs, first, second = pairs[is_late], first[is_late], second[is_late]

    def _find_unions(self, first: Any, second: Any, missing: Any) -> Any:
        """Return the ranks of unions, or `missing` for those that are no tokens."""
        hashes = self._hashes[first] * self._scales[second] + self._hashes[second]
        places = np.searchsorted(self._sorted, hashes).clip(max=len(self._sorted) - 1)
        return np.where(self._sorted[places] == hashes, self._order[places], missing)


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
