"""Drop lists: documents to leave out of a build.

A build writes lists into its work folder, where tasks look documents up: sorted digests of ids,
and record numbers by input. `drop_files.py` reads the lists that users name.
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
    """Documents to leave out, as read from one file."""

    name: str
    """The file, as the user named it."""
    ids: frozenset[str]
    records: dict[str, Int64]
    """Sorted record numbers, by input hash."""

    def __len__(self) -> int:
        return len(self.ids) + sum(len(numbers) for numbers in self.records.values())


@dataclass(frozen=True, kw_only=True)
class StoredList:
    """A drop list in a build's work folder."""

    name: str
    entries: int
    url: str
    ids: str | None
    """File name of the digests."""
    records: dict[str, str] = field(default_factory=dict)
    """File names of record numbers, by input hash."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts of record numbers, by input hash."""

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
        """Return, for documents of one input, whether the list names them: bool [documents]."""
        is_dropped = np.zeros(len(positions), bool)
        if input in self.records:
            if input not in self._numbers:
                self._numbers[input] = map_named(self.url, self.records[input]).view(np.int64)
            is_dropped = np.isin(np.array(positions, np.int64), self._numbers[input])
        if self.ids is not None and ids is not None:
            prefixes = self._prefixes
            for k, id in enumerate(ids):
                if id is not None and not is_dropped[k]:
                    is_dropped[k] = self._contains_digest(prefixes, _digest(id))
        return is_dropped

    @cached_property
    def _numbers(self) -> dict[str, Int64]:
        """Record numbers by input, mapped when first needed."""
        return {}

    @cached_property
    def _ids(self) -> Any:
        """Id digests, mapped: [entries], 16 bytes each."""
        assert self.ids is not None
        return map_named(self.url, self.ids).view(f"V{DIGEST_BYTES}")

    @cached_property
    def _prefixes(self) -> Any:
        """The digests' first halves, ascending."""
        return self._ids.view(">u8").reshape(-1, 2)[:, 0]

    def _contains_digest(self, prefixes: Any, digest: bytes) -> bool:
        index = int(np.searchsorted(prefixes, int.from_bytes(digest[:8], "big")))
        while index < len(prefixes) and self._ids[index].tobytes()[:8] == digest[:8]:
            if self._ids[index].tobytes() == digest:
                return True
            index += 1
        return False


@dataclass(frozen=True, kw_only=True)
class StoredDrops:
    """A build's drop lists."""

    digest: str
    """Hash over all documents that the lists name; number, order and form of lists do not change
    it."""
    lists: tuple[StoredList, ...]

    @staticmethod
    def write(lists: Sequence[DropList], url: str, folder: str) -> StoredDrops:
        stored_lists = tuple(StoredList.write(drop_list, url, folder) for drop_list in lists)
        return StoredDrops(digest=_hash_lists(lists), lists=stored_lists)


def _hash_lists(lists: Sequence[DropList]) -> str:
    state = hashlib.sha256(_digests({id for drop_list in lists for id in drop_list.ids}))
    for input in sorted({input for drop_list in lists for input in drop_list.records}):
        number_arrays = [
            drop_list.records[input] for drop_list in lists if input in drop_list.records
        ]
        numbers = np.unique(np.concatenate(number_arrays))
        state.update(f"{input}\0{len(numbers)}\0".encode())
        state.update(numbers.tobytes())
    return state.hexdigest()


def _digest(id: str) -> bytes:
    return hashlib.blake2b(id.encode(errors="replace"), digest_size=DIGEST_BYTES).digest()


def _digests(ids: Iterable[str]) -> bytes:
    return b"".join(sorted(_digest(id) for id in ids))
