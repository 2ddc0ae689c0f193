"""Lists of documents to leave out, of ours or of another tool.

    ids of the corpus                a text file with one on each line, or a column `id`
    input hash and record number     the columns `input` and `record`

A build writes a list into its work folder in the form that tasks look up: digests of ids, sorted,
and record numbers for each input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...console.errors import InputError
from ...dataplane.arrays import Int64
from ...dataplane.storage import storage
from ...dataplane.storage.verified import map_named, write_named
from ..files.open_file import open_file

DIGEST_BYTES = 16
COLUMNS = "a column `id`, or the columns `input` and `record`"


@dataclass(frozen=True)
class DropList:
    """Documents to leave out, as they were read."""

    ids: frozenset[str]
    records: dict[str, Int64]
    """Record numbers, sorted, by the hash of the input."""

    def __len__(self) -> int:
        return len(self.ids) + sum(len(numbers) for numbers in self.records.values())

    @property
    def digest(self) -> str:
        """Return a hash that the order and the form of the list do not change."""
        state = hashlib.sha256(_digests(self.ids))
        for input in sorted(self.records):
            state.update(f"{input}\0{len(self.records[input])}\0".encode())
            state.update(self.records[input].tobytes())
        return state.hexdigest()


@dataclass(frozen=True, kw_only=True)
class StoredDrops:
    """A drop list in the work folder of a build."""

    digest: str
    entries: int
    url: str
    ids: str | None
    """File of the digests of ids."""
    records: dict[str, str] = field(default_factory=dict)
    """Files of record numbers, by the hash of the input."""

    @staticmethod
    def write(drops: DropList, url: str, folder: str) -> StoredDrops:
        ids = write_named(url, folder, "ids", _digests(drops.ids)) if drops.ids else None
        records = {
            input: write_named(url, folder, "records", numbers.tobytes())
            for input, numbers in drops.records.items()
        }
        return StoredDrops(
            digest=drops.digest, entries=len(drops), url=url, ids=ids, records=records
        )

    @cached_property
    def _ids(self) -> Any:
        """The digests, mapped: [entries] of 16 bytes each."""
        assert self.ids is not None
        return map_named(self.url, self.ids).view(f"V{DIGEST_BYTES}")

    def drops(
        self, input: str, positions: Sequence[int], ids: Sequence[str | None] | None
    ) -> list[bool]:
        """Return for each document of an input whether the list names it."""
        named = np.zeros(len(positions), bool)
        if input in self.records:
            if input not in self._numbers:
                self._numbers[input] = map_named(self.url, self.records[input]).view(np.int64)
            named = np.isin(np.array(positions, np.int64), self._numbers[input])
        if self.ids is not None and ids is not None:
            firsts = self._firsts
            for k, id in enumerate(ids):
                if id is not None and not named[k]:
                    named[k] = self._has(firsts, _digest(id))
        found: list[bool] = named.tolist()
        return found

    @cached_property
    def _numbers(self) -> dict[str, Int64]:
        """The record numbers of the inputs that were read."""
        return {}

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


def read_lists(urls: Sequence[str]) -> DropList:
    """Return the documents that lists name, all of them together."""
    ids: set[str] = set()
    records: dict[str, list[Int64]] = {}
    for url in urls:
        before = len(ids), len(records)
        columns = _columns(url)
        if isinstance(columns, list):
            ids.update(columns)
        else:
            for input, numbers in columns.items():
                records.setdefault(input, []).append(numbers)
        if (len(ids), len(records)) == before and not columns:
            raise InputError(f"the drop list {url} is empty", hint="leave out --drop")
    joined = {input: np.unique(np.concatenate(parts)) for input, parts in records.items()}
    return DropList(frozenset(ids), joined)


def _columns(url: str) -> list[str] | dict[str, Int64]:
    """Return the ids of a list, or its record numbers by input."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if url.endswith((".parquet", ".pq")):
        try:
            with pq.ParquetFile(open_file(url)) as opened:
                names = opened.schema_arrow.names
                wanted = [name for name in ("id", "input", "record") if name in names]
                table = opened.read(columns=wanted)
        except pa.ArrowInvalid as error:
            raise InputError(f"{url} is not a Parquet file: {error}") from None
    elif url.endswith((".jsonl", ".ndjson", ".json")):
        rows = _json_rows(url)
        names = list(rows[0]) if rows else []
        wanted = [name for name in ("id", "input", "record") if name in names]
        table = pa.table({name: [row.get(name) for row in rows] for name in wanted})
    else:
        lines = storage.read(url).decode(errors="replace").splitlines()
        return [line for line in lines if line]
    if {"input", "record"} <= set(wanted):
        return _records(url, table)
    if "id" not in wanted:
        raise InputError(
            f"the drop list {url} has the columns {', '.join(names) or '(none)'}",
            hint=f"a list has {COLUMNS}",
        )
    return [str(id) for id in table.column("id").to_pylist() if id is not None]


def _json_rows(url: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(storage.read(url).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            row = error
        if not isinstance(row, dict):
            raise InputError(
                f"the drop list {url} has a line that is no JSON object", where=f"line {number}"
            )
        rows.append(row)
    return rows


def _records(url: str, table: Any) -> dict[str, Int64]:
    inputs = table.column("input").to_pylist()
    numbers = table.column("record").to_pylist()
    records: dict[str, list[int]] = {}
    for row, (input, number) in enumerate(zip(inputs, numbers, strict=True)):
        if not isinstance(input, str) or not isinstance(number, int) or number < 0:
            raise InputError(
                f"the drop list {url} has the input {input!r} and the record {number!r}",
                where=f"row {row + 1}",
                hint="an input is a hash (a text), and a record a number from 0 on",
            )
        records.setdefault(input, []).append(number)
    return {input: np.array(numbers, np.int64) for input, numbers in records.items()}


def _digest(id: str) -> bytes:
    return hashlib.blake2b(id.encode(errors="replace"), digest_size=DIGEST_BYTES).digest()


def _digests(ids: Iterable[str]) -> bytes:
    return b"".join(sorted(_digest(id) for id in ids))
