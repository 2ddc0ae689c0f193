"""Lists of documents to leave out, as tasks of a build look documents up in them.

A build writes each list into its work folder: digests of ids, sorted, and record numbers for each
input. `drop_files.py` reads the lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.storage.verified import map_named, write_named

DIGEST_BYTES = 16


@dataclass(frozen=True)
class DropList:
    """A list of documents to leave out, as it was read."""

    name: str
    """The file, as the user named it."""
    ids: frozenset[str]
    records: dict[str, Int64]
    """Record numbers, sorted, by the hash of the input."""

    def __len__(self) -> int:
        return len(self.ids) + sum(len(numbers) for numbers in self.records.values())


@dataclass(frozen=True, kw_only=True)
class StoredList:
    """A drop list in the work folder of a build."""

    name: str
    entries: int
    url: str
    ids: str | None
    """File of the digests of ids."""
    records: dict[str, str] = field(default_factory=dict)
    """Files of record numbers, by the hash of the input."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of record numbers, by the hash of the input."""

    @staticmethod
    def write(drops: DropList, url: str, folder: str) -> StoredList:
        ids = write_named(url, folder, "ids", _digests(drops.ids)) if drops.ids else None
        records = {
            input: write_named(url, folder, "records", numbers.tobytes())
            for input, numbers in drops.records.items()
        }
        counts = {input: len(numbers) for input, numbers in drops.records.items()}
        return StoredList(
            name=drops.name, entries=len(drops), url=url, ids=ids, records=records, counts=counts
        )

    def find(self, input: str, positions: Sequence[int], ids: Sequence[str | None] | None) -> Any:
        """Return for each document of an input whether the list names it, as an array."""
        found = np.zeros(len(positions), bool)
        if input in self.records:
            if input not in self._numbers:
                self._numbers[input] = map_named(self.url, self.records[input]).view(np.int64)
            found = np.isin(np.array(positions, np.int64), self._numbers[input])
        if self.ids is not None and ids is not None:
            firsts = self._firsts
            for k, id in enumerate(ids):
                if id is not None and not found[k]:
                    found[k] = self._has(firsts, _digest(id))
        return found

    @cached_property
    def _numbers(self) -> dict[str, Int64]:
        """The record numbers of the inputs that were read."""
        return {}

    @cached_property
    def _ids(self) -> Any:
        """The digests, mapped: [entries] of 16 bytes each."""
        assert self.ids is not None
        return map_named(self.url, self.ids).view(f"V{DIGEST_BYTES}")

    @cached_property
    def _firsts(self) -> Any:
        """The first halves of the digests, ascending."""
        return self._ids.view(">u8").reshape(-1, 2)[:, 0]

    def _has(self, firsts: Any, digest: bytes) -> bool:
        at = int(np.searchsorted(firsts, int.from_bytes(digest[:8], "big")))
        while at < len(firsts) and self._ids[at].tobytes()[:8] == digest[:8]:
            if self._ids[at].tobytes() == digest:
                return True
            at += 1
        return False


@dataclass(frozen=True, kw_only=True)
class StoredDrops:
    """All drop lists of a build."""

    digest: str
    """Hash of the documents that the lists name together: neither the number of the lists, nor
    their order or form change it."""
    lists: tuple[StoredList, ...]

    @staticmethod
    def write(lists: Sequence[DropList], url: str, folder: str) -> StoredDrops:
        stored = tuple(StoredList.write(each, url, folder) for each in lists)
        return StoredDrops(digest=_digest_of(lists), lists=stored)


def _digest_of(lists: Sequence[DropList]) -> str:
    state = hashlib.sha256(_digests({id for each in lists for id in each.ids}))
    for input in sorted({input for each in lists for input in each.records}):
        parts = [each.records[input] for each in lists if input in each.records]
        numbers = np.unique(np.concatenate(parts))
        state.update(f"{input}\0{len(numbers)}\0".encode())
        state.update(numbers.tobytes())
    return state.hexdigest()


def _digest(id: str) -> bytes:
    return hashlib.blake2b(id.encode(errors="replace"), digest_size=DIGEST_BYTES).digest()


def _digests(ids: Iterable[str]) -> bytes:
    return b"".join(sorted(_digest(id) for id in ids))
