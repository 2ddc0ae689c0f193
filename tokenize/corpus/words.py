"""Words of texts, and hashes of runs of consecutive words.

Texts are compared by their words, as tests for contamination do: in Unicode's form NFKC, in lower
case, without punctuation and symbols. White space separates words; other characters that are
neither letters, marks nor numbers are left out, so `Don't` is `dont`. In scripts that are written
without spaces, each character is a word.
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
"""Ends a text among others that are folded together; it is white space, so no word has it."""
PIECE = 1 << 20
"""Characters that are folded at once, and sixteen times as many bytes."""
CHUNK = re.compile(r"\S+")
SPACE = re.compile(r"\s")
LETTER = re.compile(r"[0-9A-Za-z]")

WITHOUT_SPACES = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF)),  # Thai, Lao, Burmese, Khmer
    *((0x3005, 0x3007), (0x3040, 0x30FF)),  # Japanese
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),  # Han
)
"""Characters of scripts that are written without spaces."""
LARGEST = 0x323B0
"""Larger code points are no letters, marks or numbers, but for selectors of variants."""
SELECTORS = slice(0xFE00, 0xFE10)
"""Selectors of variants, such as that of coloured symbols: no letters, though Unicode says so."""
ALONE = 1 << 31
"""Bit of a character that is a word by itself."""
SPELT = (("\u00a0", " "), ("\u2026", "."))
"""Frequent characters with another form in NFKC, and one with the same words: a text without such
characters is normal already, which is twenty times as fast to see as to make."""


@cache
def table() -> npt.NDArray[np.uint32]:
    """Return what each code point becomes: 0 if it is left out, a space, the end of a text, or a
    lower-case letter."""
    made = np.zeros(0x110000, np.uint32)
    for point in range(LARGEST):
        character = chr(point)
        if character.isspace():
            made[point] = ord(" ")
        elif unicodedata.category(character)[0] in "LMN":
            made[point] = ord(lower(character))
    made[SELECTORS] = 0
    for first, last in WITHOUT_SPACES:
        within = made[first : last + 1]
        within[within > 0] |= ALONE
    made[ord(END)] = ord("\n")
    return made


def lower(character: str) -> str:
    """Return a character as a lower-case one; a few that become several stay as they are."""
    folded = (character.casefold(), character.lower(), character)
    return next(form for form in folded if len(form) == 1)


@cache
def _ascii() -> tuple[bytes, bytes]:
    """Return what ASCII characters become, and those that are left out."""
    known = table()[:128].tolist()
    folded = [point or k for k, point in enumerate(known)]
    folded[ord(END)] = ord(" ")
    return bytes([*folded, *range(128, 256)]), bytes(k for k in range(128) if not known[k])


def fold(texts: Sequence[str]) -> list[bytes]:
    """Return the words of each text with spaces between them (one or more)."""
    becomes, left_out = _ascii()
    folded = [b""] * len(texts)
    others: list[int] = []
    size = 0
    for k, text in enumerate(texts):
        if text.isascii():
            folded[k] = text.encode().translate(becomes, left_out)
        elif len(text) > PIECE:
            folded[k] = b" ".join(_fold([piece])[0] for piece in _pieces(text))
        else:
            others.append(k)
            size += len(text)
        if size > PIECE or (others and k == len(texts) - 1):
            for other, line in zip(others, _fold([texts[k] for k in others]), strict=True):
                folded[other] = line
            others, size = [], 0
    return folded


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at white space."""
    start = 0
    while start < len(text):
        space = SPACE.search(text, start + PIECE)
        end = len(text) if space is None else space.end()
        yield text[start:end]
        start = end


def _fold(texts: Sequence[str]) -> list[bytes]:
    joined = "".join(normal(text.replace(END, " ")) + END for text in texts)
    codes: Any = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
    codes = table()[codes]
    codes = codes[codes > 0]
    if (alone := codes >= ALONE).any():
        at = np.cumsum(1 + 2 * alone) - 1 - alone  # a space before and after it
        spaced = np.full(int(at[-1]) + 1, ord(" "), np.uint32)
        spaced[at] = codes & ~np.uint32(ALONE)
        codes = spaced
    data: bytes = codes.astype("<u4").tobytes()
    return data.decode("utf-32-le").encode().split(b"\n")[:-1]


def normal(text: str) -> str:
    for character, spelling in SPELT:
        text = text.replace(character, spelling)
    return unicodedata.normalize("NFKC", text)


def spans(text: str) -> list[tuple[int, int]]:
    """Return the place of each word in a text: [start, end) in characters."""
    found: list[tuple[int, int]] = []
    for match in CHUNK.finditer(text):
        start, end = match.span()
        if match[0].isascii():  # no word, or one
            if (first := LETTER.search(text, start, end)) is not None:
                found.append((first.start(), end))
            continue
        parts = [normal(character) for character in match[0]]
        if "".join(parts) == normal(match[0]):
            found += _within(parts, start)
        else:  # characters that become one: all words of the chunk share its place
            found += [(start, end)] * len(fold([match[0]])[0].split())
    return found


def _within(parts: Sequence[str], start: int) -> Iterator[tuple[int, int]]:
    """Yield the places of words, given what each character becomes in the normal form."""
    begun = None
    for at, part in enumerate(parts, start):
        for character in part:
            point = int(table()[ord(character)])
            if (point >= ALONE or point == ord(" ")) and begun is not None:
                yield begun, at
                begun = None
            if point >= ALONE:
                yield at, at + 1
            elif point > ord(" ") and begun is None:
                begun = at
    if begun is not None:
        yield begun, start + len(parts)


# Runs of words

LOAD = 8
"""Bytes of a word that are loaded at once."""
LONG = 16 * LOAD
"""Words with more bytes are hashed one by one."""
MASKS = np.array([(1 << (8 * count)) - 1 for count in range(LOAD + 1)], np.uint64)
"""Masks of the first bytes of a load."""
FACTORS = tuple(
    np.array(number, np.uint64)
    for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
STEP = 0xFF51AFD7ED558CCD


@dataclass(frozen=True)
class Words:
    """The words of some texts."""

    data: bytes
    """Folded texts; a line feed ends each."""
    starts: Int64
    ends: Int64
    lines: Int64
    """Number of the first word of each text, and the number of all words."""

    @staticmethod
    def of(texts: Sequence[str]) -> Words:
        folded = fold(texts)
        data = b"\n".join([b"", *folded, b""])
        octets = np.frombuffer(data, np.uint8)
        word = octets > ord(" ")
        edges = np.flatnonzero(word[1:] != word[:-1]) + 1
        starts, ends = edges[::2], edges[1::2]
        begins = np.cumsum([1, *(len(line) + 1 for line in folded)])
        return Words(data, starts, ends, np.searchsorted(starts, begins))

    def line(self, word: int) -> int:
        """Return the number of the text that has a word."""
        return int(np.searchsorted(self.lines, word, side="right")) - 1

    def run(self, word: int, count: int) -> bytes:
        """Return consecutive words with one space between them."""
        return b" ".join(self.data[self.starts[word] : self.ends[word + count - 1]].split())

    def within(self, words: Int64, count: int) -> Int64:
        """Return those of the words from which `count` words are in one text."""
        end = self.lines[np.searchsorted(self.lines, words, side="right")]
        return words[words + count <= end]

    @cached_property
    def hashes(self) -> UInt64:
        """A hash of each word."""
        loads: Any = np.ndarray((len(self.data),), "<u8", self.data + bytes(LOAD), strides=(1,))
        lengths = self.ends - self.starts
        low = MASKS[np.minimum(lengths, LOAD)]
        first, last = loads[self.starts], loads[np.maximum(self.ends - LOAD, self.starts)]
        mixed = (first & low) * FACTORS[0]
        mixed ^= mixed >> np.uint64(32)
        mixed += (last & low) * FACTORS[1] + lengths.astype(np.uint64) * FACTORS[2]
        for at in range(LOAD, LONG - LOAD, LOAD):  # what lies between the first and the last load
            longer = np.flatnonzero(lengths > at + LOAD)
            if not len(longer):
                break
            mixed[longer] = (mixed[longer] ^ loads[self.starts[longer] + at]) * FACTORS[1]
            mixed[longer] ^= mixed[longer] >> np.uint64(31)
        for word in np.flatnonzero(lengths > LONG).tolist():
            mixed[word] = self._hash_of_long(word)
        mixed ^= mixed >> np.uint64(29)
        hashed: UInt64 = mixed * FACTORS[3]
        return hashed

    def _hash_of_long(self, word: int) -> np.uint64:
        text = self.data[self.starts[word] : self.ends[word]]
        return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))

    def run_hashes(self, count: int) -> UInt64:
        """Return a hash of the `count` words from each word on. The last words have none; runs that
        go on in the next text are among them."""
        block, size = self.hashes, 1
        total, length = block[:0], 0
        while True:
            if count & size:
                total, length = (_joined(total, length, block, size), length + size)
            if length == count or not len(block):
                break
            block, size = _joined(block, size, block, size), 2 * size
        total = total ^ (total >> np.uint64(31))
        return total * FACTORS[0]


def _joined(one: UInt64, length: int, other: UInt64, size: int) -> UInt64:
    """Return the hashes of runs of `length + size` words."""
    if not length:
        return other
    most = max(0, len(other) - length)
    power = np.uint64(pow(STEP, size, 2**64))
    return one[:most] * power + other[length : length + most]
