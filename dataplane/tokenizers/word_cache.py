"""BPE in the manner of SentencePiece (Llama 2, Mistral, Gemma) through a cache of words.

These tokenizers do not split a text into words: spaces become the letter `▁`, and merges could join
anything. But most pairs of characters stand side by side in no token, above all those of a letter
and a space. A text can be cut between them: merges on both sides do not depend on each other. Every
distinct word is encoded once by the `tokenizers` library itself, so unknown characters and byte
fallback are the library's. Cutting, comparing and joining are vectorized.

Characters are compared by their bytes at the cut, so that a table of 256 × 256 pairs is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .fast_bpe import Inexact
from .tokenizer import id_type

SPACE = "\u2581"
"""The letter that stands for a space."""
MAX_WORDS = 1 << 20
"""Cached words: about 200 MB."""
MAX_WORD_CHARACTERS = 4 << 20
"""Longer words take the library more than 512 MiB of memory."""
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
CONTINUATION = slice(0x80, 0xC0)
"""Bytes within a character."""
WORD_END = re.compile("[ \n]")

Prefix = Literal["always", "if missing", "never"]
"""When a space is put before a text: `if missing` leaves out texts that begin with a space."""
Encode = Callable[[Sequence[str]], list[list[int]]]


class WordCache:
    """Encodes texts by their words."""

    batch_characters = 1 << 19
    """Characters per call, which takes some 50 bytes for each."""

    def __init__(
        self,
        encode_words: Encode,
        dtype: npt.DTypeLike,
        *,
        cuts: npt.NDArray[np.bool_],
        prefix: Prefix,
        splittable: bool,
    ) -> None:
        """`cuts`: [256, 256] True where a text is cut between two bytes."""
        self.splittable = splittable
        self._encode_words, self._cuts, self._prefix = encode_words, cuts, prefix
        self._clear(np.dtype(dtype))

    def _clear(self, dtype: np.dtype[Any]) -> None:
        self._numbers: dict[bytes, int] = {}
        self._ids = np.zeros(1, dtype)
        """Ids of all words; the first one ends a text."""
        self._starts = np.array([0, 1], np.int64)
        """[words + 1] Offsets in `_ids`."""

    def needs_library(self, text: str) -> bool:
        """Return True for a text with a word that is too long."""
        return len(text) > MAX_WORD_CHARACTERS and any(
            len(word) > MAX_WORD_CHARACTERS for word in WORD_END.split(text)
        )

    def encode(
        self, texts: Sequence[str], end_id: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return the ids of all texts, with `end_id` after every text, and end offsets [texts]."""
        if len(self._numbers) > MAX_WORDS:
            self._clear(self._ids.dtype)
        self._ids[0] = end_id
        encoded = [self._normalize(text).encode() for text in texts]
        data = b"".join(encoded)
        text_ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        starts = self._find_word_starts(data, text_ends)
        numbers = self._number_words(data, starts)
        words_before = np.searchsorted(starts, text_ends)
        numbers = np.insert(numbers, words_before, 0)  # the word 0 ends a text
        lengths = np.diff(self._starts)[numbers]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        sources = np.repeat(self._starts[numbers] - (ends - lengths), lengths) + np.arange(total)
        return self._ids[sources], ends[words_before + np.arange(len(texts))]

    def _normalize(self, text: str) -> str:
        text = text.replace(SPACE, " ")
        if not text or self._prefix == "never" or (self._prefix != "always" and text[0] == " "):
            return text
        return " " + text

    def _find_word_starts(self, data: bytes, text_ends: npt.NDArray[np.int64]) -> Any:
        """Return the offsets of words; each text begins with one."""
        octets = np.frombuffer(data, np.uint8)
        is_start = np.zeros(len(data) + 1, bool)
        pairs = (octets[:-1].astype(np.uint16) << 8) | octets[1:]
        np.take(self._cuts.reshape(-1), pairs, out=is_start[1 : len(data)], mode="clip")
        is_start[0] = True
        is_start[text_ends] = True
        return np.flatnonzero(is_start[:-1])

    def _number_words(self, data: bytes, starts: npt.NDArray[np.int64]) -> Any:
        """Return the number of each word; encode words that are not cached."""
        import pyarrow as pa

        if not len(starts):
            return starts
        offsets = np.append(starts, len(data)).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        words = pa.Array.from_buffers(pa.binary(), len(starts), buffers).dictionary_encode()
        distinct: list[bytes] = words.dictionary.to_pylist()
        numbers = np.fromiter(map(self._numbers.get, distinct, repeat(-1)), np.int64)
        missing = np.flatnonzero(numbers < 0)
        if len(missing):
            numbers[missing] = self._add([distinct[k] for k in missing.tolist()])
        return numbers[np.frombuffer(words.indices.buffers()[1], np.int32)[: len(starts)]]

    def _add(self, words: Sequence[bytes]) -> range:
        """Encode words; return their numbers."""
        encoded = self._encode_words(spell_words(words))
        first = len(self._starts) - 1
        numbers = range(first, first + len(words))
        self._numbers.update(zip(words, numbers, strict=True))
        ends = self._starts[-1] + np.cumsum(np.fromiter(map(len, encoded), np.int64))
        self._starts = np.concatenate([self._starts, ends])
        new_ids = np.fromiter(chain.from_iterable(encoded), self._ids.dtype)
        self._ids = np.concatenate([self._ids, new_ids])
        return numbers


def spell_words(words: Sequence[bytes]) -> list[str]:
    """Return words as the library's model reads them, decoded together: that takes half the time of
    one after another."""
    spellings = b"\0".join(words).decode().replace(" ", SPACE).split("\0")
    if len(spellings) > len(words):  # some hold the separator
        return [word.decode().replace(" ", SPACE) for word in words]
    return spellings


def replaces_spaces(tokenizer: Mapping[str, Any]) -> bool:
    """Return True for a tokenizer in the manner of SentencePiece."""
    steps = [tokenizer["normalizer"] or {}, tokenizer["pre_tokenizer"] or {}]
    steps += [step for parent in steps for step in parent.get("normalizers", ())]
    return any(SPACE in (step.get("content"), step.get("replacement")) for step in steps)


def convert_words(tokenizer: Mapping[str, Any], encode_words: Encode) -> WordCache:
    """Convert a tokenizer, from JSON content; raise Inexact if ids may differ."""
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise Inexact(f"its model is {model['type']}, not BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            raise Inexact(f"its model sets {key}")
    vocabulary = model["vocab"]
    prefix, splits, splittable = _read_spaces(tokenizer)
    cuts = _find_cuts(model["merges"])
    if not (model.get("byte_fallback") and vocabulary.keys() >= set(BYTE_TOKENS)):
        # Unknown characters side by side may become one token.
        letters = [SPACE if byte == ord(" ") else chr(byte) for byte in range(128)]
        is_known = np.array([letter in vocabulary for letter in letters] + 128 * [False])
        cuts &= is_known[:, None] | is_known
    cuts[:, ord(" ")] |= splits
    size = 1 + max(*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"]), 0)
    return WordCache(encode_words, id_type(size), cuts=cuts, prefix=prefix, splittable=splittable)


def _read_spaces(tokenizer: Mapping[str, Any]) -> tuple[Prefix, bool, bool]:
    """Return when a space is put before a text; True if texts are split before every space; and
    True if a part of a text gets a space as a text does."""
    steps = tokenizer["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps = steps.get("normalizers", [steps])
    step = tokenizer["pre_tokenizer"]
    if step is not None and step["type"] == "Metaspace":
        if steps or step["replacement"] != SPACE:
            raise Inexact("it normalizes texts before it replaces spaces")
        scheme = step["prepend_scheme"]
        return ("never" if scheme == "never" else "if missing"), step["split"], scheme != "first"
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    if steps not in ([replace], [prepend, replace]):
        raise Inexact("its normalizer is not supported")
    # Gemma splits at spaces, of which the normalizer leaves none.
    if step is not None and (step["type"], step.get("pattern")) != ("Split", {"String": " "}):
        raise Inexact("its pre-tokenizer is not supported")
    return ("always" if len(steps) == 2 else "never"), False, True


def _find_cuts(merges: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Return the pairs of bytes [256, 256] that lie between two characters which no merge joins."""
    cuts = np.ones((256, 256), bool)
    cuts[:, CONTINUATION] = False
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    if not {half for pair in pairs for half in pair}.isdisjoint(BYTE_TOKENS):
        raise Inexact("its merges join tokens of bytes")
    # A union is produced by merges of its parts, so the place where it is joined is enough.
    for before, after in {(first[-1], second[0]) for first, second in pairs}:
        last, first = before.replace(SPACE, " ").encode()[-1], after.replace(SPACE, " ").encode()[0]
        cuts[last, first] = False
    return cuts
