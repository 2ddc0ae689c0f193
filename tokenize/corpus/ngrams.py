"""Evaluations' n-grams, and a search for them in texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .words import UInt64, Words

DIGEST_BYTES = 16
MAX_FILTER_BITS = 29
"""Upper bound on the hash bits in the filter: 64 MiB."""

ENTRY = np.dtype(
    [("hash", "<u8"), ("digest", f"V{DIGEST_BYTES}"), ("evaluation", "<u4"), ("record", "<u4")]
)
"""An n-gram, and the first record of an evaluation with it. The hash finds an n-gram; the digest
proves it."""


@dataclass(frozen=True)
class Hit:
    """An n-gram that a text shares with an evaluation."""

    text: int
    """The text's index."""
    word: int
    """The first word's index in the text."""
    words: int
    evaluation: int
    record: int


@dataclass(frozen=True)
class Ngrams:
    """Evaluations' n-grams, sorted by hash."""

    entries: Any
    """ENTRY [n-grams]."""
    lengths: tuple[int, ...]
    """N-gram lengths, in words."""

    @staticmethod
    def from_entries(entries: Any, lengths: Sequence[int]) -> Ngrams:
        """Sort entries, given in evaluation order; among equal n-grams keep the first."""
        halves = entries["digest"].copy().view("<u8").reshape(-1, 2)
        keys = (entries["evaluation"], halves[:, 1], halves[:, 0], entries["hash"])
        entries = entries[np.lexsort(keys)]  # stable: the first record comes first
        is_first = np.ones(len(entries), bool)
        equal_fields = [
            entries[name][1:] == entries[name][:-1] for name in ("digest", "evaluation")
        ]
        is_first[1:] = ~np.logical_and(*equal_fields)
        return Ngrams(entries[is_first], tuple(sorted(set(lengths))))

    def find(self, texts: Sequence[str]) -> list[Hit]:
        """Find n-grams that texts share with evaluations; return hits in text order."""
        words = Words.from_texts(texts)
        hits: list[Hit] = []
        for count in self.lengths:
            hashes = words.hash_runs(count)
            for word in words.fit_runs(self._find_known(hashes), count).tolist():
                hits += self._find_hits(words, word, count, hashes[word])
        return sorted(hits, key=lambda hit: (hit.text, hit.word, hit.words, hit.evaluation))

    def _find_known(self, hashes: UInt64) -> Any:
        """Return indices into `hashes` where an entry has the hash."""
        slots = hashes >> self._shift
        candidates = np.flatnonzero(self._filter[slots >> np.uint64(3)] & _slot_bits(slots))
        indices = np.searchsorted(self._hashes, hashes[candidates])
        indices = np.minimum(indices, len(self._hashes) - 1)
        return candidates[self._hashes[indices] == hashes[candidates]]

    def _find_hits(self, words: Words, word: int, count: int, hash: np.uint64) -> Iterator[Hit]:
        run_digest = digest(words.join_run(word, count))
        text = words.text_index(word)
        index = int(np.searchsorted(self._hashes, hash))
        while index < len(self._hashes) and self._hashes[index] == hash:
            entry = self.entries[index]
            if entry["digest"].tobytes() == run_digest:
                first_word = word - int(words.first_words[text])
                yield Hit(text, first_word, count, int(entry["evaluation"]), int(entry["record"]))
            index += 1

    @cached_property
    def _hashes(self) -> UInt64:
        return np.ascontiguousarray(self.entries["hash"])

    @cached_property
    def _shift(self) -> np.uint64:
        """Number of low hash bits that the filter ignores."""
        num_bits = (64 * len(self.entries)).bit_length()
        return np.uint64(64 - min(MAX_FILTER_BITS, max(10, num_bits)))

    @cached_property
    def _filter(self) -> Any:
        """A bit set over the hashes' high bits; it rejects nearly all n-grams in a corpus."""
        bits = np.zeros((1 << (64 - int(self._shift))) // 8, np.uint8)
        slots = self._hashes >> self._shift
        np.bitwise_or.at(bits, slots >> np.uint64(3), _slot_bits(slots))
        return bits


def digest(run: bytes) -> bytes:
    """Digest a run: words with one space between them."""
    return hashlib.blake2b(run, digest_size=DIGEST_BYTES).digest()


def _slot_bits(slots: UInt64) -> Any:
    return np.uint8(1) << (slots & np.uint64(7)).astype(np.uint8)
