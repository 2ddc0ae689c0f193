"""MinHash signatures of texts, and the keys of their bands."""

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
def rensa() -> Any:
    """Import the library."""
    try:
        import rensa
    except ImportError:
        raise MissingError(
            "near-duplicates need the package rensa", hint="pip install 'headrace[neardup]'"
        ) from None
    return rensa.RMinHash


def shingles(texts: Sequence[str], ngram: int) -> tuple[UInt64, list[int]]:
    """Return the hashes of the runs of words of texts, one text after the other, and the edges of
    the texts. A text of fewer words is one run; one without words is itself one."""
    words = Words.of(texts)
    hashes = words.run_hashes(ngram)
    parts: list[UInt64] = []
    edges = [0]
    for text, first, last in zip(texts, words.lines[:-1], words.lines[1:], strict=True):
        part = hashes[first : max(first, last - ngram + 1)]
        if not len(part):
            whole = words.run(int(first), int(last - first)) if last > first else text.encode()
            part = np.frombuffer(hashlib.blake2b(whole, digest_size=8).digest(), "<u8")
        parts.append(part)
        edges.append(edges[-1] + len(part))
    return np.concatenate([hashes[:0], *parts]), edges


def signatures(texts: Sequence[str], config: LshConfig) -> Any:
    """Return a row of `permutations` numbers for each text."""
    hashes, edges = shingles(texts, config.ngram)
    made = rensa().digest_matrix_from_flat_token_hashes(
        hashes, np.array(edges, np.int64), config.permutations, config.seed
    )
    return np.array(made.to_rows(), np.uint64).reshape(len(texts), config.permutations)


def band_keys(texts: Sequence[str], config: LshConfig) -> UInt64:
    """Return a hash of each band: [bands, texts]."""
    numbers = signatures(texts, config).reshape(len(texts), config.bands, config.rows)
    keys = np.zeros((len(texts), config.bands), np.uint64)
    for row in range(config.rows):
        keys = (keys ^ numbers[:, :, row]) * FACTOR
        keys ^= keys >> np.uint64(32)
    return np.ascontiguousarray(keys.T) * FACTOR
