"""Permutations of any length in constant memory: Feistel networks with cycle walking.

A Feistel network is a bijection on integers with an even number of bits, for any round function.
The narrowest network that covers `length` integers is applied repeatedly to each result that falls
outside [0, length) until it falls inside: at most four times on average. This is a bijection again.

One walk computes images under any number of permutations: an array operation costs as much for one
integer as for hundreds.
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
KEYS = 1 << 13
"""Permutations whose keys a process keeps: about 3 MB."""
POWERS = 4 ** np.arange(32, dtype=np.int64)
"""By half of its bits, the integers of a network."""
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(bits) for bits in (30, 27, 31))
_encode = json.JSONEncoder(separators=(",", ":")).encode

Name = tuple[int | str, ...]
"""The parts that name a permutation."""


def key(*parts: int | str) -> UInt64:
    """Derive the round keys of a permutation: [ROUNDS, 1]."""
    return keys_of([parts])


def keys_of(names: Iterable[Name]) -> UInt64:
    """Derive the round keys of permutations: [ROUNDS, names]."""
    digests = b"".join([_digest(name) for name in names])
    return np.frombuffer(digests, np.uint64).reshape(-1, ROUNDS).T


@lru_cache(KEYS)
def _digest(name: Name) -> bytes:
    return hashlib.blake2b(_encode(name).encode(), digest_size=8 * ROUNDS).digest()


def permute(keys: UInt64, length: int | Int64, positions: Int64) -> Int64:
    """Return the images of positions under permutations of [0, length).

    `keys` are those of one permutation, [ROUNDS, 1], or those of each position's, [ROUNDS,
    positions]; then `length` is that of each."""
    if keys.shape[1] == 1 and len(positions):
        low, high = positions.min(), positions.max() + 1
        if high - low < len(positions):  # the rows of a window lie in few chunks
            images = _walk(_feistel, keys, length, np.arange(low, high))
            spread: Int64 = images[positions - low]
            return spread
    return _walk(_feistel, keys, length, positions)


def invert(keys: UInt64, length: int | Int64, images: Int64) -> Int64:
    """Return the positions that have these images: the inverse of `permute`."""
    return _walk(_unfeistel, keys, length, images)


@dataclass(frozen=True, eq=False, slots=True)
class _Networks:
    """One network for all values, or one for each."""

    keys: UInt64
    half: UInt64
    """Bits of a half of a value."""
    mask: UInt64
    size: UInt64
    """Values that are inside."""

    @classmethod
    def of(cls, keys: UInt64, length: int | Int64) -> _Networks:
        size = np.atleast_1d(length)[: keys.shape[1]]
        half = np.maximum(1, POWERS.searchsorted(size)).astype(np.uint64)
        mask = (np.uint64(1) << half) - np.uint64(1)
        return cls(keys, half, mask, size.astype(np.uint64))

    def __getitem__(self, places: Int64) -> _Networks:
        if len(self.size) == 1:
            return self
        return _Networks(
            self.keys[:, places], self.half[places], self.mask[places], self.size[places]
        )


Step = Callable[[_Networks, UInt64], UInt64]


def _walk(step: Step, keys: UInt64, length: int | Int64, numbers: Int64) -> Int64:
    """Apply `step` until every number is below `length` again."""
    networks = _Networks.of(keys, length)
    values = step(networks, numbers.astype(np.uint64))
    outside = np.flatnonzero(values >= networks.size)
    while outside.size:
        part = networks[outside]
        values[outside] = stepped = step(part, values[outside])
        outside = outside[stepped >= part.size]
    return values.astype(np.int64)


def _feistel(networks: _Networks, values: UInt64) -> UInt64:
    half, mask = networks.half, networks.mask
    left, right = values >> half, values & mask
    for round_key in networks.keys:
        left, right = right, left ^ (mix(right ^ round_key) & mask)
    return (left << half) | right


def _unfeistel(networks: _Networks, values: UInt64) -> UInt64:
    half, mask = networks.half, networks.mask
    left, right = values >> half, values & mask
    for round_key in networks.keys[::-1]:
        left, right = right ^ (mix(left ^ round_key) & mask), left
    return (left << half) | right


def mix(values: UInt64) -> UInt64:
    """Stafford's finaliser: each input bit changes about half of the output bits."""
    values = (values ^ (values >> _SHIFT_1)) * _MIX_1
    values = (values ^ (values >> _SHIFT_2)) * _MIX_2
    mixed: UInt64 = values ^ (values >> _SHIFT_3)
    return mixed
