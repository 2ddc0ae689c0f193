"""Permutations of any length in constant memory: Feistel networks with cycle walking.

A Feistel network is a bijection on integers with an even number of bits, for any round function.
The narrowest network that covers `length` integers is applied repeatedly to each result that falls
outside [0, length) until it falls inside: at most four times on average. This is a bijection again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...arrays import Int64
from .bounded import Bounded

UInt64 = npt.NDArray[np.uint64]
Step = Callable[[UInt64, np.uint64, np.uint64, UInt64], UInt64]

ROUNDS = 6
TABLE = 1 << 15
"""Permutations up to this length are stored as tables (64 KiB)."""
TABLES_BYTES = 4 << 20
"""Bytes of all tables of a process."""
REPAID = 16
"""A table is made once 1/16 of its entries has been asked for."""
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key(*parts: int | str) -> UInt64:
    """Derive round keys from the parts that name a permutation."""
    text = json.dumps(parts, separators=(",", ":")).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=8 * ROUNDS).digest(), np.uint64)


def permute(keys: UInt64, length: int, positions: Int64) -> Int64:
    """Return the images of positions under the permutation of [0, length) that `keys` define."""
    return _walk(_feistel, keys, length, positions)


def invert(keys: UInt64, length: int, places: Int64) -> Int64:
    """Return the positions whose images are `places`: the inverse of `permute`."""
    return _walk(_unfeistel, keys, length, places)


Tables = Bounded["Permutation", npt.NDArray[np.uint16]]
_TABLES: Tables = Bounded(TABLES_BYTES)


class Permutation:
    """A permutation for repeated use: a short one is stored as a table once it has been asked for
    often enough to repay it."""

    __slots__ = ("asked", "keys", "length", "tables")

    def __init__(self, keys: UInt64, length: int, tables: Tables = _TABLES) -> None:
        self.keys, self.length, self.tables = keys, length, tables
        self.asked = 0
        """Images computed since there was a table."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Permutation, (self.keys, self.length))  # another process has its own tables

    def image(self, positions: Int64) -> Int64:
        if self.length <= TABLE:
            table = self.tables.get(self)
            if table is None:
                self.asked += len(positions)
                if self.asked < self.length // REPAID:
                    return permute(self.keys, self.length, positions)
                self.asked = 0
                table = permute(self.keys, self.length, np.arange(self.length)).astype(np.uint16)
                self.tables.keep(self, table, table.nbytes)
            return table[positions].astype(np.int64)
        # The rows of a window lie in few chunks: compute each chunk once.
        distinct, back = np.unique(positions, return_inverse=True)
        return permute(self.keys, self.length, distinct)[back]

    def place(self, images: Int64) -> Int64:
        return invert(self.keys, self.length, images)


def _walk(step: Step, keys: UInt64, length: int, numbers: Int64) -> Int64:
    """Apply `step` until every number is below `length` again."""
    if length < 2:
        return np.zeros_like(numbers)
    half = np.uint64(max(1, -(-(length - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    size = np.uint64(length)
    values = step(keys, half, mask, numbers.astype(np.uint64))
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = step(keys, half, mask, values[outside])
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(keys: UInt64, half: np.uint64, mask: np.uint64, values: UInt64) -> UInt64:
    left, right = values >> half, values & mask
    for round_key in keys:
        left, right = right, left ^ (mix(right ^ round_key) & mask)
    return (left << half) | right


def _unfeistel(keys: UInt64, half: np.uint64, mask: np.uint64, values: UInt64) -> UInt64:
    left, right = values >> half, values & mask
    for round_key in keys[::-1]:
        left, right = right ^ (mix(left ^ round_key) & mask), left
    return (left << half) | right


def mix(values: UInt64) -> UInt64:
    """Stafford's finaliser: each input bit changes about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: UInt64 = values ^ (values >> np.uint64(31))
    return mixed
