"""Read drop lists, of ours or of another tool.

    ids of the corpus                a text file with one on each line, or a column `id`
    input hash and record number     the columns `input` and `record`

An unreadable entry is an error with its line: a document meant to be dropped would stay. An empty
text or JSON lines file is an error too; a Parquet file without rows drops nothing. Text is UTF-8;
a byte-order mark and blank lines are ignored.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...console.errors import InputError, run_all
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import open_parquet
from ..files.open_file import open_file
from .drop_list import DropList

COLUMNS = "a column `id`, or the columns `input` and `record`"
HASH_DIGITS, SHA256_DIGITS = 32, 64
"""Inputs are hashed to the first HASH_DIGITS digits of sha256; other tools write all digits."""
AGAIN = "run `tokenize neardup` again with the same inputs, or restore the list from a copy"
RESTORE = "restore the file from a copy, or write it again"
LIMIT = 1 << 63
"""Record numbers are stored in 64 bits."""

DropEntry = tuple[int, dict[str, Any]]
"""An entry's number in the file, from 1, and its columns: `input` and `record`, or `id`."""


def read_lists(urls: Sequence[str]) -> list[DropList]:
    """Read drop lists; errors in several lists are raised together."""
    return run_all(*(partial(_read_list, url) for url in dict.fromkeys(urls)))


def _read_list(url: str) -> DropList:
    if url.endswith((".parquet", ".pq")):  # its columns say that it is a list, also without rows
        return _build_list(url, "row", _parquet_rows(url))
    if url.endswith((".jsonl", ".ndjson", ".json")):
        drop_list = _build_list(url, "line", _json_rows(url))
    else:
        drop_list = DropList(url, frozenset(line for _, line in _lines(url)), {})
    if not len(drop_list):
        raise InputError(f"the drop list {url} is empty", hint="leave out --drop for this list")
    return drop_list


def _build_list(url: str, unit: str, rows: Iterable[DropEntry]) -> DropList:
    ids: set[str] = set()
    records: dict[str, list[int]] = {}
    for number, row in rows:
        try:
            if "id" in row:
                ids.add(_parse_id(row["id"]))
            else:
                input, record = _parse_place(row["input"], row["record"])
                records.setdefault(input, []).append(record)
        except ValueError as error:
            raise InputError(
                f"the drop list {url} has {error}",
                where=f"{unit} {number}",
                hint="an id is a text or a number; an input is a hash (a text), and a record a "
                "number from 0 on",
            ) from None
    numbers = {
        input: np.unique(np.array(record_numbers, np.int64))
        for input, record_numbers in records.items()
    }
    return DropList(url, frozenset(ids), numbers)


def _parse_id(value: Any) -> str:
    """Return an id as text, the form in which ids are compared; raise ValueError."""
    if value is None:
        raise ValueError("an entry without id")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"the id {value!r:.100}")
    return str(value)


def _parse_place(input: Any, record: Any) -> tuple[str, int]:
    """Return an input's hash, of HASH_DIGITS digits, and a record number; raise ValueError."""
    is_number = isinstance(record, int) and not isinstance(record, bool) and 0 <= record < LIMIT
    if not isinstance(input, str) or not is_number:
        raise ValueError(f"the input {input!r:.100} and the record {record!r:.100}")
    return input[:HASH_DIGITS] if len(input) == SHA256_DIGITS else input, record


def _entry_columns(url: str, names: Collection[str], where: str | None = None) -> tuple[str, ...]:
    """Return the columns that hold a list's entries."""
    for columns in (("input", "record"), ("id",)):
        if set(columns) <= set(names):
            return columns
    raise InputError(
        f"the drop list {url} has the columns {', '.join(names) or '(none)'}",
        where=where,
        hint=f"a list has {COLUMNS}",
    )


def _parquet_rows(url: str) -> Iterator[DropEntry]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        stream = open_parquet(url, open_file(url), hint=AGAIN)
        with pq.ParquetFile(stream) as opened:
            columns = _entry_columns(url, opened.schema_arrow.names)
            for batch in opened.iter_batches(columns=list(columns), use_threads=False):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, ValueError) as error:
        position = f"after row {number}" if number else None
        raise InputError(
            f"the drop list {url} is damaged, or is not a Parquet file: {error}",
            where=position,
            hint=RESTORE,
        ) from None


def _json_rows(url: str) -> Iterator[DropEntry]:
    columns: tuple[str, ...] | None = None
    for number, line in _lines(url):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise InputError(
                f"the drop list {url} has a line that is no JSON object", where=f"line {number}"
            )
        columns = columns or _entry_columns(url, row, f"line {number}")
        yield number, {name: row.get(name) for name in columns}


def _lines(url: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, except blank ones, without the byte-order mark."""
    data = storage.read(url).removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InputError(
                f"the drop list {url} is not UTF-8: {error.reason} at byte {error.start} of a line",
                where=f"line {number}",
                hint="save it as UTF-8; a list is not compressed",
            ) from None
        if text.strip():
            yield number, text
