"""Permutations of any length in constant memory: Feistel networks with cycle walking.

A Feistel network is a bijection on integers with an even number of bits, for any round function.
The narrowest network that covers [0, length) is applied again to every result outside this range,
at most four times on average. This is a bijection on the range.

One walk serves any number of permutations: an array operation costs as much for one integer as for
hundreds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ...arrays import Int64

UInt64 = npt.NDArray[np.uint64]

ROUNDS = 6
MAX_CACHED_KEYS = 1 << 13
"""Maximum permutations with cached keys: about 3 MB."""
NETWORK_SIZES = 4 ** np.arange(32, dtype=np.int64)
"""Integers that a network covers, by the bits in a half."""
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(bits) for bits in (30, 27, 31))
_encode = json.JSONEncoder(separators=(",", ":")).encode

PermutationName = tuple[int | str, ...]


def derive_key(*name: int | str) -> UInt64:
    """Derive the round keys [ROUNDS, 1] for a permutation's name."""
    return derive_keys([name])


def derive_keys(names: Iterable[PermutationName]) -> UInt64:
    """Derive the round keys [ROUNDS, names]."""
    digests = b"".join([_digest(name) for name in names])
    return np.frombuffer(digests, np.uint64).reshape(-1, ROUNDS).T


@lru_cache(MAX_CACHED_KEYS)
def _digest(name: PermutationName) -> bytes:
    return hashlib.blake2b(_encode(name).encode(), digest_size=8 * ROUNDS).digest()


def permute(keys: UInt64, length: int | Int64, positions: Int64) -> Int64:
    """Permute positions within [0, length).

    `keys` [ROUNDS, 1] name one permutation; `keys` [ROUNDS, n] and `length` [n] name one per
    position.
    """
    if keys.shape[1] == 1 and len(positions):
        low, high = positions.min(), positions.max() + 1
        if high - low < len(positions):  # the rows of a window lie in few chunks
            table = _walk(_feistel, keys, length, np.arange(low, high))
            images: Int64 = table[positions - low]
            return images
    return _walk(_feistel, keys, length, positions)


def invert(keys: UInt64, length: int | Int64, images: Int64) -> Int64:
    """Return the positions that `permute` maps to these images."""
    return _walk(_unfeistel, keys, length, images)


@dataclass(frozen=True, eq=False, slots=True)
class _Networks:
    """One network for all values, or one per value."""

    keys: UInt64
    half: UInt64
    """Bits in a half."""
    mask: UInt64
    size: UInt64
    """End of the range [0, size)."""

    @classmethod
    def build(cls, keys: UInt64, length: int | Int64) -> _Networks:
        size = np.atleast_1d(length)[: keys.shape[1]]
        half = np.maximum(1, NETWORK_SIZES.searchsorted(size)).astype(np.uint64)
        mask = (np.uint64(1) << half) - np.uint64(1)
        return cls(keys, half, mask, size.astype(np.uint64))

    def __getitem__(self, indices: Int64) -> _Networks:
        if len(self.size) == 1:
            return self
        return _Networks(
            self.keys[:, indices], self.half[indices], self.mask[indices], self.size[indices]
        )


Bijection = Callable[[_Networks, UInt64], UInt64]


def _walk(bijection: Bijection, keys: UInt64, length: int | Int64, numbers: Int64) -> Int64:
    """Apply the bijection until every number is back in [0, length)."""
    networks = _Networks.build(keys, length)
    values = bijection(networks, numbers.astype(np.uint64))
    outside = np.flatnonzero(values >= networks.size)
    while outside.size:
        subset = networks[outside]
        values[outside] = images = bijection(subset, values[outside])
        outside = outside[images >= subset.size]
    return values.astype(np.int64)


def _feistel(networks: _Networks, values: UInt64) -> UInt64:
    half, mask = networks.half, networks.mask
    high, low = values >> half, values & mask
    for round_key in networks.keys:
        high, low = low, high ^ (mix(low ^ round_key) & mask)
    return (high << half) | low


def _unfeistel(networks: _Networks, values: UInt64) -> UInt64:
    half, mask = networks.half, networks.mask
    high, low = values >> half, values & mask
    for round_key in networks.keys[::-1]:
        high, low = low ^ (mix(high ^ round_key) & mask), high
    return (high << half) | low


def mix(values: UInt64) -> UInt64:
    """Mix bits by Stafford's finaliser: an input bit flips about half the output bits."""
    values = (values ^ (values >> _SHIFT_1)) * _MIX_1
    values = (values ^ (values >> _SHIFT_2)) * _MIX_2
    mixed: UInt64 = values ^ (values >> _SHIFT_3)
    return mixed
