r"""Byte-level BPE through tiktoken, for tokenizers where its ids equal those of `tokenizers`.

tiktoken's inner loop is several times as fast as that of `tokenizers`, and three times as fast
again if its pattern has no look-ahead. The ids are equal under three conditions, all of which are
checked:

1. The merges. tiktoken joins the pair whose union has the lowest rank; `tokenizers` joins the
   pairs in its list, which may hold several pairs for a token, each with its own rank. They agree
   if every token, encoded alone, ends with a pair listed for it, and if those pairs are listed in
   the order of the tokens (`_check_merges` checks both). Proof: if the two ever differed, at a pair
   (x, y) that is not listed although xy is a token, or that is listed elsewhere, then the token xy
   alone would end with that pair as well.
2. The pattern. All supported ones (PATTERNS) end in `\s+(?!\S)|\s+`: of several spaces, the last
   belongs to the next word. Without the look-ahead, a mark before that last space has the same
   effect: the original pattern splits there too, because no alternative matches across it.
3. The character classes. Each library has its own tables for \s, \p{L} and \p{N};
   `tests/dataplane/tokenizers/test_fast_bpe.py` compares them on every character of Unicode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}|", r"\p{N}|")
PATTERNS = {GPT2: False, LLAMA3: True, QWEN2: True}
"""Supported patterns; True if line breaks are kept with the spaces before them."""

END, CUT = "\x1e", "\x1f"
"""Marks for the end of a document and for a split within it. Texts that contain one of them are
encoded one by one on the slow path."""
BATCH = 256 << 10
"""Characters encoded by one call: text that fits into a core's private cache is fastest."""

NARROW_SPACES = "\t\n\x0b\x0c\r "
WIDE_SPACES = "\x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
WIDE_SPACES += "\u2028\u2029\u202f\u205f\u3000"
SPACES = NARROW_SPACES + WIDE_SPACES
WIDE_SPACE = [
    re.compile(rb"\xc2[\x85\xa0]"),
    re.compile(rb"\xe1\x9a\x80"),
    re.compile(rb"\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|\x81\x9f)"),
    re.compile(rb"\xe3\x80\x80"),
]
"""Match a space of more than one byte, in UTF-8. A search for one first byte is fastest."""

SPACE, LAST, WORD = 1, 2, 4
"""Kinds of characters as bits: a space; a space that may be the last of several and belong to the
next word; the first character of a word."""

Pair = tuple[bytes, bytes]
"""Two tokens that a merge joins."""


class Inexact(Exception):
    """A tokenizer cannot be converted with equal ids; the message is the reason."""


class FastBpe:
    """A tiktoken encoding that gives the ids of a `tokenizers` tokenizer."""

    def __init__(self, ranks: dict[bytes, int], ids: npt.NDArray[np.uint32], pattern: str) -> None:
        """`ids` holds the id of each rank."""
        import tiktoken

        assert r"|\s+(?!\S)|\s+" in pattern
        marked = pattern.replace(r"[^\s\p{L}\p{N}]", rf"[^\s\p{{L}}\p{{N}}{END}{CUT}]")
        marked = f"[{END}{CUT}]|" + marked.replace(r"\s+(?!\S)|", "")
        # tiktoken returns ids as an array only after a search for special tokens. A token that no
        # text contains is searched for quickly; an empty set would match at every position.
        self._encoding = tiktoken.Encoding(
            "headrace",
            pat_str=marked,
            mergeable_ranks=ranks,
            special_tokens={END + CUT: len(ranks)},
        )
        self._ids = ids
        self._end, self._cut = ranks[END.encode()], ranks[CUT.encode()]
        self._kinds = np.full(ord(max(SPACES)) + 2, WORD, np.uint8)
        self._kinds[[ord(c) for c in SPACES]] = SPACE | LAST
        self._kinds[ord(END)] = 0
        if PATTERNS[pattern]:
            self._kinds[[ord("\r"), ord("\n")]] = SPACE
        # By byte: bytes beyond ASCII are parts of characters, and not of spaces in texts that have
        # only narrow spaces.
        self._narrow = self._kinds[:128].tobytes() + bytes([WORD]) * 128

    def encode(
        self, texts: Sequence[str], end: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Return the ids of all texts, each followed by `end`, and the end of each text in them."""
        joined = END.join([*texts, ""])
        marked = self._mark(joined)
        ranks = self._encoding.encode_to_numpy(marked, disallowed_special=())
        if len(marked) > len(joined):
            ranks = ranks[ranks != self._cut]
        ends = np.flatnonzero(ranks == self._end)
        ids = self._ids[ranks]
        ids[ends] = end
        return ids, ends + 1

    def _mark(self, text: str) -> str:
        """Insert CUT before the last of several spaces if a word follows."""
        encoding, data = "utf-8", text.encode()
        units: npt.NDArray[Any] = np.frombuffer(data, np.uint8)
        if len(data) > len(text) and any(wide.search(data) for wide in WIDE_SPACE):
            encoding = "utf-32-le"
            units = np.frombuffer(text.encode(encoding), np.uint32)
            kinds = self._kinds[np.minimum(units, len(self._kinds) - 1)]
        else:
            kinds = np.frombuffer(data.translate(self._narrow), np.uint8)
        # Positions where three consecutive characters are SPACE, LAST and WORD.
        places = kinds[:-2] & (kinds[1:-1] >> 1) & (kinds[2:] >> 2) & 1
        cuts = np.flatnonzero(places.view(bool)) + 1
        return np.insert(units, cuts, ord(CUT)).tobytes().decode(encoding) if len(cuts) else text


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
    pattern = _pattern(tokenizer.get("pre_tokenizer"))
    added = {token["content"] for token in tokenizer.get("added_tokens", ())}
    ranks, ids = _ranks(model, added)
    return FastBpe(ranks, ids, pattern)


def _pattern(pre: dict[str, Any] | None) -> str:
    """Return the pattern that splits texts into words, if it is supported."""
    if pre is not None and pre["type"] == "ByteLevel" and pre.get("use_regex", True):
        if pre.get("add_prefix_space"):
            raise Inexact("it adds a space before each text")
        return GPT2
    steps = (pre or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        raise Inexact("its pre-tokenizer is not supported")
    split, level = steps
    if level.get("use_regex", True) or level.get("add_prefix_space"):
        raise Inexact("its pre-tokenizer splits texts twice, or adds a space before them")
    pattern = split["pattern"].get("Regex", "")
    if pattern not in PATTERNS or split["behavior"] != "Isolated" or split.get("invert"):
        raise Inexact("its pre-tokenizer's pattern is not supported")
    return str(pattern)


def _ranks(
    model: dict[str, Any], added: Set[str]
) -> tuple[dict[bytes, int], npt.NDArray[np.uint32]]:
    """Return the rank of each token's bytes, and the id of each rank."""
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
    _check_merges(listed, ranks)
    if model.get("ignore_merges"):
        # Added tokens are marks of the caller (see `spelled`).
        for token in vocabulary.keys() - added:
            if octets.keys() >= set(token) and bytes(octets[c] for c in token) not in ranks:
                raise Inexact(f"its token {token!r} is produced by no merge")
    return ranks, np.array(ids, np.uint32)


def _check_merges(listed: Mapping[bytes, Mapping[Pair, int]], ranks: Mapping[bytes, int]) -> None:
    """Raise Inexact unless each token, encoded alone, ends with a pair listed for it, and these
    pairs are listed in the order of the tokens. `listed` has the line of each pair of a token."""
    last, made = -1, dict[bytes, Pair]()
    for whole, pairs in listed.items():
        rank = ranks[whole]
        for left, right in pairs:
            before = ranks.get(left, rank) < rank > ranks.get(right, rank)
            if before and _is_last(left, right, made, ranks):
                break
        else:
            raise Inexact(f"its merges never produce the token {whole!r} by a listed pair")
        made[whole] = left, right
        line = pairs[made[whole]]
        if line < last:
            raise Inexact(f"its merges into {whole!r} are not listed together")
        last = line


def _is_last(
    left: bytes, right: bytes, made: Mapping[bytes, Pair], ranks: Mapping[bytes, int]
) -> bool:
    """Return True if both parts, side by side, are produced before anything joins across them.

    Parts are produced in the order of their ranks, for both parts of a token rank below it. So two
    tokens meet at the boundary until the one of the higher rank is divided, going back in time; of
    two equal ones, the left one is produced first. Joined, they must rank behind that moment.
    """
    while len(left) > 1 or len(right) > 1:
        if ranks[left] > ranks[right]:
            moment, left = ranks[left], made[left][1]
        else:
            moment, right = ranks[right] + 1, made[right][0]
        if ranks.get(left + right, moment) < moment:
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
