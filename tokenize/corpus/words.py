"""Words in texts, and hashes over runs of consecutive words.

Texts are compared by words, as is usual for contamination: in Unicode's form NFKC, in lower case,
without punctuation and symbols. White space separates words; all other characters except letters,
marks and numbers are removed, so `Don't` is `dont`. In scripts written without spaces, a character
is a word.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dataplane.arrays import Int64

UInt64 = npt.NDArray[np.uint64]

END = "\x1e"
"""Separates texts that are folded together; it is white space, so no word contains it."""
BLOCK_CHARACTERS = 1 << 20
"""Characters folded at once; folding takes sixteen bytes per character."""
CHUNK = re.compile(r"\S+")
SPACE = re.compile(r"\s")
LETTER = re.compile(r"[0-9A-Za-z]")

WITHOUT_SPACES = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF)),  # Thai, Lao, Burmese, Khmer
    *((0x3005, 0x3007), (0x3040, 0x30FF)),  # Japanese
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),  # Han
)
"""Code points [first, last] in scripts written without spaces."""
END_CODE_POINT = 0x323B0
"""Code points from here on are no letters, marks or numbers, except variation selectors."""
SELECTORS = slice(0xFE00, 0xFE10)
"""Variation selectors, as of coloured symbols: Unicode calls them marks, but no word needs them."""
WORD_BIT = 1 << 31
"""Set in codes for characters that are words by themselves."""
FREQUENT_SPELLINGS = (("\u00a0", " "), ("\u2026", "."))
"""Frequent characters that NFKC changes, with a spelling of the same words. A text without them is
usually normalized already, and checking that is twenty times faster than normalizing."""


@cache
def folding_table() -> npt.NDArray[np.uint32]:
    """Return the folded code of every code point: 0 (removed), a space, the end of a text, or a
    lower-case letter."""
    code_points = np.zeros(0x110000, np.uint32)
    for point in range(END_CODE_POINT):
        character = chr(point)
        if character.isspace():
            code_points[point] = ord(" ")
        elif unicodedata.category(character)[0] in "LMN":
            code_points[point] = ord(lower(character))
    code_points[SELECTORS] = 0
    for first, last in WITHOUT_SPACES:
        script = code_points[first : last + 1]
        script[script > 0] |= WORD_BIT
    code_points[ord(END)] = ord("\n")
    return code_points


def lower(character: str) -> str:
    """Lower a character; the few whose lower case is several characters stay as they are."""
    candidates = (character.casefold(), character.lower(), character)
    return next(candidate for candidate in candidates if len(candidate) == 1)


@cache
def _ascii_table() -> tuple[bytes, bytes]:
    """Return the arguments of bytes.translate: the table, and the ASCII characters to delete."""
    targets = folding_table()[:128].tolist()
    folded = [point or k for k, point in enumerate(targets)]
    folded[ord(END)] = ord(" ")
    return bytes([*folded, *range(128, 256)]), bytes(k for k in range(128) if not targets[k])


def fold(texts: Sequence[str]) -> list[bytes]:
    """Return every text's words, separated by one or more spaces."""
    translation, deleted = _ascii_table()
    folded = [b""] * len(texts)
    non_ascii: list[int] = []
    size = 0
    for k, text in enumerate(texts):
        if text.isascii():
            folded[k] = text.encode().translate(translation, deleted)
        elif len(text) > BLOCK_CHARACTERS:
            folded[k] = b" ".join(_fold([piece])[0] for piece in _cut_blocks(text))
        else:
            non_ascii.append(k)
            size += len(text)
        if size > BLOCK_CHARACTERS or (non_ascii and k == len(texts) - 1):
            for index, line in zip(non_ascii, _fold([texts[k] for k in non_ascii]), strict=True):
                folded[index] = line
            non_ascii, size = [], 0
    return folded


def _cut_blocks(text: str) -> Iterator[str]:
    """Cut a text at white space."""
    start = 0
    while start < len(text):
        space = SPACE.search(text, start + BLOCK_CHARACTERS)
        end = len(text) if space is None else space.end()
        yield text[start:end]
        start = end


def _fold(texts: Sequence[str]) -> list[bytes]:
    joined = "".join(normalize(text.replace(END, " ")) + END for text in texts)
    codes: Any = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    codes = folding_table()[codes]
    codes = codes[codes > 0]
    if (is_word := codes >= WORD_BIT).any():
        positions = np.cumsum(1 + 2 * is_word) - 1 - is_word  # a space before and after it
        spaced_codes = np.full(int(positions[-1]) + 1, ord(" "), np.uint32)
        spaced_codes[positions] = codes & ~np.uint32(WORD_BIT)
        codes = spaced_codes
    data: bytes = codes.astype("<u4").tobytes()
    return data.decode("utf-32-le").encode().split(b"\n")[:-1]


def normalize(text: str) -> str:
    for character, spelling in FREQUENT_SPELLINGS:
        text = text.replace(character, spelling)
    return unicodedata.normalize("NFKC", text)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return [start, end) of every word in a text, in characters."""
    spans: list[tuple[int, int]] = []
    for match in CHUNK.finditer(text):
        start, end = match.span()
        if match[0].isascii():  # no word, or one
            if (first := LETTER.search(text, start, end)) is not None:
                spans.append((first.start(), end))
            continue
        normalized = [normalize(character) for character in match[0]]
        if "".join(normalized) == normalize(match[0]):
            spans += _chunk_spans(normalized, start)
        else:  # characters that become one: all words of the chunk share its place
            spans += [(start, end)] * len(fold([match[0]])[0].split())
    return spans


def _chunk_spans(normalized: Sequence[str], start: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of words in a chunk that begins at `start`; `normalized` has the normal form
    of every character."""
    word_start = None
    for position, characters in enumerate(normalized, start):
        for character in characters:
            point = int(folding_table()[ord(character)])
            if (point >= WORD_BIT or point == ord(" ")) and word_start is not None:
                yield word_start, position
                word_start = None
            if point >= WORD_BIT:
                yield position, position + 1
            elif point > ord(" ") and word_start is None:
                word_start = position
    if word_start is not None:
        yield word_start, start + len(normalized)


# Runs of words

LOAD = 8
"""Word bytes loaded at once."""
LONG_WORD_BYTES = 16 * LOAD
"""Words with more bytes are hashed one by one."""
MASKS = np.array([(1 << (8 * count)) - 1 for count in range(LOAD + 1)], np.uint64)
"""Masks that keep a load's first bytes."""
FACTORS = tuple(
    np.array(number, np.uint64)
    for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
STEP = 0xFF51AFD7ED558CCD


@dataclass(frozen=True)
class Words:
    """Words in texts."""

    data: bytes
    """Folded texts, each ended by a line feed."""
    starts: Int64
    ends: Int64
    first_words: Int64
    """First word indices by text, then the word count: [texts + 1]."""

    @staticmethod
    def from_texts(texts: Sequence[str]) -> Words:
        folded = fold(texts)
        data = b"\n".join([b"", *folded, b""])
        octets = np.frombuffer(data, np.uint8)
        word = octets > ord(" ")
        edges = np.flatnonzero(word[1:] != word[:-1]) + 1
        starts, ends = edges[::2], edges[1::2]
        begins = np.cumsum([1, *(len(line) + 1 for line in folded)])
        return Words(data, starts, ends, np.searchsorted(starts, begins))

    def text_index(self, word: int) -> int:
        """Return the index for the text that contains a word."""
        return int(np.searchsorted(self.first_words, word, side="right")) - 1

    def join_run(self, word: int, count: int) -> bytes:
        """Return consecutive words with one space between them."""
        return b" ".join(self.data[self.starts[word] : self.ends[word + count - 1]].split())

    def fit_runs(self, words: Int64, count: int) -> Int64:
        """Select the words that begin a run of `count` words within one text."""
        end = self.first_words[np.searchsorted(self.first_words, words, side="right")]
        return words[words + count <= end]

    @cached_property
    def hashes(self) -> UInt64:
        """A hash per word."""
        loads: Any = np.ndarray((len(self.data),), "<u8", self.data + bytes(LOAD), strides=(1,))
        lengths = self.ends - self.starts
        masks = MASKS[np.minimum(lengths, LOAD)]
        first_loads = loads[self.starts]
        last_loads = loads[np.maximum(self.ends - LOAD, self.starts)]
        mixed = (first_loads & masks) * FACTORS[0]
        mixed ^= mixed >> np.uint64(32)
        mixed += (last_loads & masks) * FACTORS[1] + lengths.astype(np.uint64) * FACTORS[2]
        # Long words have more loads between the first and the last.
        for offset in range(LOAD, LONG_WORD_BYTES - LOAD, LOAD):
            longer = np.flatnonzero(lengths > offset + LOAD)
            if not len(longer):
                break
            mixed[longer] = (mixed[longer] ^ loads[self.starts[longer] + offset]) * FACTORS[1]
            mixed[longer] ^= mixed[longer] >> np.uint64(31)
        for word in np.flatnonzero(lengths > LONG_WORD_BYTES).tolist():
            mixed[word] = self._hash_long_word(word)
        mixed ^= mixed >> np.uint64(29)
        hashed: UInt64 = mixed * FACTORS[3]
        return hashed

    def _hash_long_word(self, word: int) -> np.uint64:
        text = self.data[self.starts[word] : self.ends[word]]
        return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))

    def hash_runs(self, count: int) -> UInt64:
        """Hash the run of `count` words that begins at every word, also across the end of a text.

        The last `count - 1` words begin no run. A run is joined from blocks whose lengths are
        powers of two.
        """
        blocks, block_length = self.hashes, 1
        runs, run_length = blocks[:0], 0
        while True:
            if count & block_length:
                runs = _join_runs(runs, run_length, blocks, block_length)
                run_length += block_length
            if run_length == count or not len(blocks):
                break
            blocks = _join_runs(blocks, block_length, blocks, block_length)
            block_length *= 2
        runs = runs ^ (runs >> np.uint64(31))
        return runs * FACTORS[0]


def _join_runs(left: UInt64, left_length: int, right: UInt64, right_length: int) -> UInt64:
    """Return the hashes of runs of `left_length + right_length` words, from those of both parts."""
    if not left_length:
        return right
    num_runs = max(0, len(right) - left_length)
    power = np.uint64(pow(STEP, right_length, 2**64))
    return left[:num_runs] * power + right[left_length : left_length + num_runs]
