r"""Byte-level BPE through fastokens, for tokenizers where its ids equal those of `tokenizers`.

fastokens splits texts by vector instructions and remembers the ids of words; it is more than ten
times as fast as `tokenizers`. It gets the tokens in the order in which merges produce them, each
with one merge. The ids are equal under three conditions, all of which are checked:

1. The merges. fastokens joins the pair whose union comes first; `tokenizers` joins the pairs in its
   list, which may hold several pairs for a token, each with its own place. They agree if every
   token, encoded alone, ends with a pair listed for it, and if those pairs are listed in the order
   of the tokens (`_last_merges` checks both). Proof: if the two ever differed, at a pair (x, y)
   that is not listed although xy is a token, or that is listed elsewhere, then the token xy alone
   would end with that pair as well.
2. The pattern that splits texts into words is one that fastokens splits without a regex engine.
3. The character classes. Each library has its own tables for \s, \p{L} and \p{N};
   `tests/dataplane/tokenizers/test_words.py` compares the words of every character of Unicode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from .tokenizer import id_type

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}|", r"\p{N}|")
PATTERNS = (LLAMA3, QWEN2)
"""Supported patterns, besides the one of GPT-2, which ByteLevel has itself."""

BATCH = 1 << 19
"""Characters encoded by one call."""
THREADS = "FASTOKENS_BPE_THREADS"
"""Environment variable of fastokens. A build has a process for each core, so one thread each."""

Pair = tuple[bytes, bytes]
"""Two tokens that a merge joins."""


class Inexact(Exception):
    """A tokenizer cannot be converted with equal ids; the message is the reason."""


class FastBpe:
    """A fastokens tokenizer that gives the ids of a `tokenizers` tokenizer."""

    def __init__(
        self,
        merges: Mapping[bytes, Pair],
        ids: npt.NDArray[Any],
        pre_tokenizer: Mapping[str, Any],
    ) -> None:
        """`merges` holds the last merge of each token, and `ids` the id of each byte and token."""
        self._merges, self._ids, self._pre_tokenizer = merges, ids, pre_tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer of fastokens. It takes as long as `tokenizers` for a megabyte of text."""
        os.environ.setdefault(THREADS, "1")
        from fastokens import Tokenizer

        letters = byte_letters()
        table = str.maketrans({chr(byte): letter for byte, letter in letters.items()})
        names = {
            token: token.decode("latin-1").translate(table)
            for token in (*(bytes([byte]) for byte in range(256)), *self._merges)
        }
        model = {
            "type": "BPE",
            "vocab": {name: rank for rank, name in enumerate(names.values())},
            "merges": [[names[left], names[right]] for left, right in self._merges.values()],
        }
        unused = ("normalizer", "post_processor", "decoder", "truncation", "padding")
        content: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": self._pre_tokenizer,
            "model": model,
            **dict.fromkeys(unused),
        }
        return Tokenizer.from_json_str(json.dumps(content))

    def encode(
        self, texts: Sequence[str], end: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the ids of all texts, each followed by `end`, and the end of each text in them."""
        ranks, bounds = self._tokenizer.encode_batch_flat(list(texts))
        ends = np.frombuffer(bounds, np.int64)[1:]
        ids = np.insert(self._ids[np.frombuffer(ranks, np.uint32)], ends, end)
        return ids, ends + np.arange(1, len(ends) + 1)


def convert(tokenizer: dict[str, Any]) -> FastBpe:
    """Convert a tokenizer, given as the content of its JSON; raises Inexact if ids may differ."""
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
    _check_pattern(tokenizer.get("pre_tokenizer"))
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    merges, ids = _merges(model, added.keys())
    size = 1 + max(*model["vocab"].values(), *added.values())
    return FastBpe(merges, np.array(ids, id_type(size)), tokenizer["pre_tokenizer"])


def _check_pattern(pre: dict[str, Any] | None) -> None:
    """Raise Inexact unless the pattern that splits texts into words is supported."""
    if pre is not None and pre["type"] == "ByteLevel" and pre.get("use_regex", True):
        if pre.get("add_prefix_space"):
            raise Inexact("it adds a space before each text")
        return
    steps = (pre or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        raise Inexact("its pre-tokenizer is not supported")
    split, level = steps
    if level.get("use_regex", True) or level.get("add_prefix_space"):
        raise Inexact("its pre-tokenizer splits texts twice, or adds a space before them")
    pattern = split["pattern"].get("Regex", "")
    if pattern not in PATTERNS or split["behavior"] != "Isolated" or split.get("invert"):
        raise Inexact("its pre-tokenizer's pattern is not supported")


def _merges(model: dict[str, Any], added: Set[str]) -> tuple[dict[bytes, Pair], list[int]]:
    """Return the last merge of each token, in their order, and the ids of all bytes and tokens."""
    vocabulary: dict[str, int] = model["vocab"]
    letters = byte_letters()
    octets = {letter: byte for byte, letter in letters.items()}
    if missing := [byte for byte, letter in letters.items() if letter not in vocabulary]:
        raise Inexact(f"it has no token for the byte {missing[0]:#x}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    texts = set(chain.from_iterable(merges))
    if unknown := set("".join(texts)) - octets.keys():
        raise Inexact(f"its merges have the letter {min(unknown)!r}, which encodes no byte")
    spelling = str.maketrans({letter: chr(byte) for letter, byte in octets.items()})
    parts = {text: text.translate(spelling).encode("latin-1") for text in texts}
    ids = [vocabulary[letters[byte]] for byte in range(256)]
    listed: dict[bytes, dict[Pair, int]] = {}
    for line, (left, right) in enumerate(merges):
        pair = parts[left], parts[right]
        whole = pair[0] + pair[1]
        if whole not in listed:
            listed[whole] = {}
            ids.append(vocabulary[left + right])
        listed[whole][pair] = line
    ranks = {bytes([byte]): byte for byte in letters}
    ranks |= {whole: rank for rank, whole in enumerate(listed, start=256)}
    made = _last_merges(listed, ranks)
    if model.get("ignore_merges"):
        # Added tokens are marks of the caller (see `spelled`).
        for token in vocabulary.keys() - added:
            if octets.keys() >= set(token) and bytes(octets[c] for c in token) not in ranks:
                raise Inexact(f"its token {token!r} is produced by no merge")
    return made, ids


def _last_merges(
    listed: Mapping[bytes, Mapping[Pair, int]], ranks: Mapping[bytes, int]
) -> dict[bytes, Pair]:
    """Return the pair with which each token, encoded alone, ends; raise Inexact unless it is listed
    for the token, in the order of the tokens. `listed` has the line of each pair of a token."""
    last, made = -1, dict[bytes, Pair]()
    tokens = [*(bytes([byte]) for byte in range(256)), *listed]
    parts = [(byte, byte) for byte in range(256)]
    for rank, (whole, pairs) in enumerate(listed.items(), start=256):
        for pair in pairs:
            left, right = ranks.get(pair[0], rank), ranks.get(pair[1], rank)
            if left < rank > right and _is_last(left, right, parts, tokens, ranks):
                break
        else:
            raise Inexact(f"its merges never produce the token {whole!r} by a listed pair")
        made[whole] = pair
        parts.append((left, right))
        line = pairs[pair]
        if line < last:
            raise Inexact(f"its merges into {whole!r} are not listed together")
        last = line
    return made


def _is_last(
    left: int,
    right: int,
    parts: Sequence[tuple[int, int]],
    tokens: Sequence[bytes],
    ranks: Mapping[bytes, int],
) -> bool:
    """Return True if both parts, side by side, are produced before anything joins across them.

    Parts are given by their ranks, and produced in this order, for both parts of a token rank below
    it. So two tokens meet at the boundary until the one of the higher rank is divided, going back
    in time; of two equal ones, the left one is produced first. Joined, they must rank behind that
    moment. The first 256 ranks are bytes, which are not divided.
    """
    while left > 255 or right > 255:
        if left > right:
            moment, left = left, parts[left][1]
        else:
            moment, right = right + 1, parts[right][0]
        if ranks.get(tokens[left] + tokens[right], moment) < moment:
            return False
    return True


def spelled(token: str) -> str | None:
    """Return the text of a token of a byte-level vocabulary, or None if it is not valid UTF-8."""
    octets = {letter: byte for byte, letter in byte_letters().items()}
    if any(letter not in octets for letter in token):
        return None
    try:
        return bytes(octets[letter] for letter in token).decode()
    except UnicodeDecodeError:
        return None


def byte_letters() -> dict[int, str]:
    """Return the letter that byte-level vocabularies use for each byte: the byte's own character if
    it is printable, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(rest)
    }
