r"""Byte-level BPE through fastokens, for tokenizers where its ids equal those from `tokenizers`.

fastokens splits texts by vector instructions and caches word ids; it is more than ten times as fast
as `tokenizers`. It receives the tokens in the order in which merges produce them, with a single
merge per token. The ids are equal under three conditions, which are all checked:

1. Merges. fastokens joins the pair whose union comes first; `tokenizers` joins pairs by their place
   in a list, which may hold several pairs per token. They agree if every token, encoded alone, ends
   with a pair listed for the token, and if these pairs are listed in token order
   (`_find_last_merges` checks both). Proof: if the two ever differed, at a pair (x, y) that is not
   listed although xy is a token, or that is listed elsewhere, then the token xy alone would end
   with that pair as well.
2. The pattern that splits texts into words. fastokens must split it without a regex engine.
3. Character classes. The libraries have different tables for \s, \p{L} and \p{N};
   `tests/dataplane/tokenizers/test_words.py` compares words for every Unicode character.
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
"""Supported patterns, besides GPT-2's, which ByteLevel includes."""

BATCH_CHARACTERS = 1 << 19
"""Characters per call."""
THREADS = "FASTOKENS_BPE_THREADS"
"""Environment variable for fastokens: a thread per process, because a build has a process per
core."""

Pair = tuple[bytes, bytes]
"""The two tokens joined by a merge."""


class Inexact(Exception):
    """Conversion would change ids; the message is the reason."""


class FastBpe:
    """A fastokens tokenizer with the same ids as a `tokenizers` tokenizer."""

    def __init__(
        self,
        merges: Mapping[bytes, Pair],
        ids: npt.NDArray[Any],
        pre_tokenizer: Mapping[str, Any],
    ) -> None:
        """`merges` maps tokens to their last merge; `ids` has the ids of bytes, then tokens."""
        self._merges, self._ids, self._pre_tokenizer = merges, ids, pre_tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        """The fastokens tokenizer. Building it takes as long as `tokenizers` for 1 MB of text."""
        os.environ.setdefault(THREADS, "1")
        from fastokens import Tokenizer

        letters = letters_by_byte()
        byte_table = str.maketrans({chr(byte): letter for byte, letter in letters.items()})
        token_names = {
            token: token.decode("latin-1").translate(byte_table)
            for token in (*(bytes([byte]) for byte in range(256)), *self._merges)
        }
        model = {
            "type": "BPE",
            "vocab": {name: rank for rank, name in enumerate(token_names.values())},
            "merges": [
                [token_names[first], token_names[second]] for first, second in self._merges.values()
            ],
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
        self, texts: Sequence[str], end_id: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the ids of all texts, with `end_id` after every text, and end offsets [texts]."""
        ranks, end_bytes = self._tokenizer.encode_batch_flat(list(texts))
        ends = np.frombuffer(end_bytes, np.int64)[1:]
        ids = np.insert(self._ids[np.frombuffer(ranks, np.uint32)], ends, end_id)
        return ids, ends + np.arange(1, len(ends) + 1)


def convert(tokenizer: dict[str, Any]) -> FastBpe:
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
    _check_pattern(tokenizer.get("pre_tokenizer"))
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    merges, ids = _read_merges(model, added.keys())
    size = 1 + max(*model["vocab"].values(), *added.values())
    return FastBpe(merges, np.array(ids, id_type(size)), tokenizer["pre_tokenizer"])


def _check_pattern(pre_tokenizer: dict[str, Any] | None) -> None:
    """Raise Inexact unless the pattern that splits texts into words is supported."""
    if (
        pre_tokenizer is not None
        and pre_tokenizer["type"] == "ByteLevel"
        and pre_tokenizer.get("use_regex", True)
    ):
        if pre_tokenizer.get("add_prefix_space"):
            raise Inexact("it adds a space before each text")
        return
    steps = (pre_tokenizer or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        raise Inexact("its pre-tokenizer is not supported")
    split, byte_level = steps
    if byte_level.get("use_regex", True) or byte_level.get("add_prefix_space"):
        raise Inexact("its pre-tokenizer splits texts twice, or adds a space before them")
    pattern = split["pattern"].get("Regex", "")
    if pattern not in PATTERNS or split["behavior"] != "Isolated" or split.get("invert"):
        raise Inexact("its pre-tokenizer's pattern is not supported")


def _read_merges(model: dict[str, Any], added: Set[str]) -> tuple[dict[bytes, Pair], list[int]]:
    """Return last merges by token, in order, and the ids of all bytes and tokens."""
    vocabulary: dict[str, int] = model["vocab"]
    letters = letters_by_byte()
    octets = {letter: byte for byte, letter in letters.items()}
    if missing := [byte for byte, letter in letters.items() if letter not in vocabulary]:
        raise Inexact(f"it has no token for the byte {missing[0]:#x}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    spellings = set(chain.from_iterable(merges))
    if unknown := set("".join(spellings)) - octets.keys():
        raise Inexact(f"its merges have the letter {min(unknown)!r}, which encodes no byte")
    byte_table = str.maketrans({letter: chr(byte) for letter, byte in octets.items()})
    token_bytes = {
        spelling: spelling.translate(byte_table).encode("latin-1") for spelling in spellings
    }
    ids = [vocabulary[letters[byte]] for byte in range(256)]
    merge_lines: dict[bytes, dict[Pair, int]] = {}
    for line, (first, second) in enumerate(merges):
        pair = token_bytes[first], token_bytes[second]
        token = pair[0] + pair[1]
        if token not in merge_lines:
            merge_lines[token] = {}
            ids.append(vocabulary[first + second])
        merge_lines[token][pair] = line
    ranks = {bytes([byte]): byte for byte in letters}
    ranks |= {token: rank for rank, token in enumerate(merge_lines, start=256)}
    last_merges = _find_last_merges(merge_lines, ranks)
    if model.get("ignore_merges"):
        # The caller handles added tokens (see `decode_token`).
        for spelling in vocabulary.keys() - added:
            if octets.keys() >= set(spelling) and bytes(octets[c] for c in spelling) not in ranks:
                raise Inexact(f"its token {spelling!r} is produced by no merge")
    return last_merges, ids


def _find_last_merges(
    merge_lines: Mapping[bytes, Mapping[Pair, int]], ranks: Mapping[bytes, int]
) -> dict[bytes, Pair]:
    """Return the last pair joined when a token is encoded alone, by token; raise Inexact unless the
    pair is listed for the token, in token order. `merge_lines` has the line of every listed
    pair."""
    last_line, merges = -1, dict[bytes, Pair]()
    tokens = [*(bytes([byte]) for byte in range(256)), *merge_lines]
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
    tokens: Sequence[bytes],
    ranks: Mapping[bytes, int],
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


def letters_by_byte() -> dict[int, str]:
    """Return the letters for bytes in byte-level vocabularies: the byte's character if it is
    printable, else the next character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(unprintable)
    }
