"""Files that hold the hash of their own content: JSON documents and Parquet tables with a seal.

    {"step": 12, …, "seal": "5d0c…"}       sha256 of the document without the seal, as JSON
    key `headrace.seal` of the metadata    sha256 of the whole file, with zeros in the seal's place

A seal goes where the file goes, and covers every byte that a reader uses. A file that another
program has written again has none.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from ...console.errors import IntegrityError, StorageError

KEY = "seal"
PARQUET_KEY = b"headrace.seal"
EMPTY = b"0" * 64
TAIL = 64 << 10
"""Bytes at the end of a Parquet file that hold its metadata."""
PARQUET_SEAL = re.compile(re.escape(PARQUET_KEY) + rb".{1,4}?([0-9a-f]{64})", re.DOTALL)


def sealed(data: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return a JSON document with its seal."""
    return json.dumps({**data, KEY: _digest(data)}, indent=indent).encode()


def unsealed(where: str, text: bytes, *, hint: str, version: int | None = None) -> dict[str, Any]:
    """Return the content of a sealed document, without the seal; raise if it is damaged, or of
    another format version than `version`."""
    try:
        data: dict[str, Any] = json.loads(text)
        data[KEY]
    except (ValueError, KeyError, TypeError):
        raise _damaged(where, hint) from None
    if version is not None:
        check_version(where, data.get("version"), version, hint=hint)
    check_seal(where, data, hint=hint)
    return data


def check_version(where: str, stored: object, version: int, *, hint: str) -> None:
    """Raise unless a file has the format version that this headrace reads."""
    if stored != version:
        raise StorageError(
            f"{where} has format version {stored}; this headrace reads {version}", hint=hint
        )


def check_seal(where: str, data: dict[str, Any], *, hint: str) -> None:
    """Remove the seal of a document that may have one: people write such documents too. Raise if it
    is not that of the content."""
    if KEY in data and data.pop(KEY) != _digest(data):
        raise _damaged(where, hint)


def sealed_parquet(schema: Any, tables: Iterable[Any]) -> bytes:
    """Return a Parquet file of these tables, with its seal."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema) as writer:
        for table in tables:
            writer.write_table(table)
        writer.add_key_value_metadata({PARQUET_KEY: EMPTY})
    data = bytearray(sink.getvalue())
    start, end = _place(data)
    data[start:end] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def checked_parquet(where: str, stream: BinaryIO, *, hint: str) -> BinaryIO:
    """Return a Parquet file to read from: its verified bytes if it has a seal, else the same."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - TAIL))
    with_seal = PARQUET_KEY in stream.read()
    stream.seek(0)
    if not with_seal:
        return stream
    data = stream.read()
    check_parquet(where, data, hint=hint)
    return io.BytesIO(data)


def check_parquet(where: str, data: bytes, *, hint: str) -> None:
    """Raise unless the seal of a Parquet file is that of its bytes."""
    try:
        start, end = _place(data)
    except ValueError:
        raise _damaged(where, hint) from None
    empty = b"".join([data[:start], EMPTY, data[end:]])
    if hashlib.sha256(empty).hexdigest().encode() != data[start:end]:
        raise _damaged(where, hint)


def _place(data: bytes | bytearray) -> tuple[int, int]:
    """Return where the seal of a Parquet file is; raise ValueError. The metadata is at its end."""
    match = PARQUET_SEAL.search(data, data.rindex(PARQUET_KEY))
    if match is None:
        raise ValueError("no seal follows its key")
    return match.span(1)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _damaged(where: str, hint: str) -> IntegrityError:
    return IntegrityError(f"{where} is damaged: its content does not match its hash", hint=hint)
