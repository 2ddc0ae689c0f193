"""MinHash signatures for texts, and their band keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ...console.errors import MissingError
from ..corpus.words import UInt64, Words
from .lsh import LshConfig

FACTOR = np.uint64(0x9E3779B97F4A7C15)


@cache
def import_rensa() -> Any:
    """Import the MinHash library."""
    try:
        import rensa
    except ImportError:
        raise MissingError(
            "near-duplicates need the package rensa", hint="pip install 'headrace[neardup]'"
        ) from None
    return rensa.RMinHash


def hash_shingles(texts: Sequence[str], ngram: int) -> tuple[UInt64, list[int]]:
    """Hash the `ngram`-word runs in texts; return the hashes, text after text, and the edges
    between texts: [texts + 1]. A text with fewer words is one run; a text without words is hashed
    itself."""
    words = Words.from_texts(texts)
    hashes = words.hash_runs(ngram)
    text_hashes: list[UInt64] = []
    edges = [0]
    for text, first, end in zip(texts, words.first_words[:-1], words.first_words[1:], strict=True):
        run_hashes = hashes[first : max(first, end - ngram + 1)]
        if not len(run_hashes):
            count = int(end - first)
            key = words.join_run(int(first), count) if count else text.encode()
            run_hashes = np.frombuffer(hashlib.blake2b(key, digest_size=8).digest(), "<u8")
        text_hashes.append(run_hashes)
        edges.append(edges[-1] + len(run_hashes))
    return np.concatenate([hashes[:0], *text_hashes]), edges


def compute_signatures(texts: Sequence[str], config: LshConfig) -> Any:
    """Return MinHash signatures: [texts, permutations]."""
    hashes, edges = hash_shingles(texts, config.ngram)
    matrix = import_rensa().digest_matrix_from_flat_token_hashes(
        hashes, np.array(edges, np.int64), config.permutations, config.seed
    )
    return np.array(matrix.to_rows(), np.uint64).reshape(len(texts), config.permutations)


def compute_band_keys(texts: Sequence[str], config: LshConfig) -> UInt64:
    """Hash all bands: [bands, texts]."""
    numbers = compute_signatures(texts, config).reshape(len(texts), config.bands, config.rows)
    keys = np.zeros((len(texts), config.bands), np.uint64)
    for row in range(config.rows):
        keys = (keys ^ numbers[:, :, row]) * FACTOR
        keys ^= keys >> np.uint64(32)
    return np.ascontiguousarray(keys.T) * FACTOR
