"""N-grams of the words of documents, and where texts have them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .words import UInt64, Words

DIGEST_BYTES = 16
LONGEST_FILTER = 29
"""Most bits of a hash that the filter uses: 64 MiB."""

ENTRY = np.dtype(
    [("hash", "<u8"), ("digest", f"V{DIGEST_BYTES}"), ("evaluation", "<u4"), ("record", "<u4")]
)
"""An n-gram of an evaluation, and the first record that has it. The hash finds it, and the digest
proves it."""


@dataclass(frozen=True)
class Hit:
    """An n-gram that a text shares with an evaluation."""

    text: int
    """Number of the text."""
    word: int
    """Number of its first word in the text."""
    words: int
    evaluation: int
    record: int


@dataclass(frozen=True)
class Ngrams:
    """N-grams of evaluations, sorted by their hashes."""

    entries: Any
    """[n-grams] of ENTRY."""
    lengths: tuple[int, ...]
    """Numbers of their words."""

    @staticmethod
    def of(entries: Any, lengths: Sequence[int]) -> Ngrams:
        """Return the n-grams of entries in the order of the evaluations."""
        halves = entries["digest"].copy().view("<u8").reshape(-1, 2)
        keys = (entries["evaluation"], halves[:, 1], halves[:, 0], entries["hash"])
        entries = entries[np.lexsort(keys)]  # stable: the first record comes first
        first = np.ones(len(entries), bool)
        same = [entries[name][1:] == entries[name][:-1] for name in ("digest", "evaluation")]
        first[1:] = ~np.logical_and(*same)
        return Ngrams(entries[first], tuple(sorted(set(lengths))))

    def find(self, texts: Sequence[str]) -> list[Hit]:
        """Return the n-grams that texts share with evaluations, in the order of the texts."""
        words = Words.of(texts)
        hits: list[Hit] = []
        for count in self.lengths:
            hashes = words.run_hashes(count)
            for word in words.within(self._known(hashes), count).tolist():
                hits += self._hits(words, word, count, hashes[word])
        return sorted(hits, key=lambda hit: (hit.text, hit.word, hit.words, hit.evaluation))

    def _known(self, hashes: UInt64) -> Any:
        """Return the indices of the hashes that entries have."""
        places = hashes >> self._shift
        maybe = np.flatnonzero(self._filter[places >> np.uint64(3)] & _bit(places))
        at = np.searchsorted(self._hashes, hashes[maybe])
        return maybe[self._hashes[np.minimum(at, len(self._hashes) - 1)] == hashes[maybe]]

    def _hits(self, words: Words, word: int, count: int, hash: np.uint64) -> Iterator[Hit]:
        run = digest(words.run(word, count))
        text = words.line(word)
        at = int(np.searchsorted(self._hashes, hash))
        while at < len(self._hashes) and self._hashes[at] == hash:
            entry = self.entries[at]
            if entry["digest"].tobytes() == run:
                first = word - int(words.lines[text])
                yield Hit(text, first, count, int(entry["evaluation"]), int(entry["record"]))
            at += 1

    @cached_property
    def _hashes(self) -> UInt64:
        return np.ascontiguousarray(self.entries["hash"])

    @cached_property
    def _shift(self) -> np.uint64:
        """Bits of a hash that the filter leaves out."""
        wanted = (64 * len(self.entries)).bit_length()
        return np.uint64(64 - min(LONGEST_FILTER, max(10, wanted)))

    @cached_property
    def _filter(self) -> Any:
        """A bit for the beginning of each hash, which stops nearly all n-grams of a corpus."""
        bits = np.zeros((1 << (64 - int(self._shift))) // 8, np.uint8)
        places = self._hashes >> self._shift
        np.bitwise_or.at(bits, places >> np.uint64(3), _bit(places))
        return bits


def digest(run: bytes) -> bytes:
    """Return the digest of words with one space between them."""
    return hashlib.blake2b(run, digest_size=DIGEST_BYTES).digest()


def _bit(places: UInt64) -> Any:
    return np.uint8(1) << (places & np.uint64(7)).astype(np.uint8)
