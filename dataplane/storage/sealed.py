"""Files with a seal, the hash of their content: JSON documents and Parquet tables.

    {"step": 12, …, "seal": "5d0c…"}       sha256 of the document without the seal, as JSON
    key `headrace.seal` of the metadata    sha256 of the whole file, with zeros in the seal's place

A seal goes where the file goes, and covers every byte that a reader uses. A file that a different
program has rewritten has none.
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
"""Last bytes of a Parquet file, which hold its metadata."""
PARQUET_SEAL = re.compile(re.escape(PARQUET_KEY) + rb".{1,4}?([0-9a-f]{64})", re.DOTALL)


def seal(data: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return a JSON document with its seal."""
    return json.dumps({**data, KEY: _digest(data)}, indent=indent).encode()


def unseal(where: str, text: bytes, *, hint: str, version: int | None = None) -> dict[str, Any]:
    """Return a sealed document's content without its seal.

    Raise if it is damaged, or has a format version that is not `version`.
    """
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
    """Remove a document's seal; raise if it does not match the content.

    A document without a seal passes: people write such documents too.
    """
    if KEY in data and data.pop(KEY) != _digest(data):
        raise _damaged(where, hint)


def seal_parquet(schema: Any, tables: Iterable[Any]) -> bytes:
    """Return a sealed Parquet file with these tables."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema) as writer:
        for table in tables:
            writer.write_table(table)
        writer.add_key_value_metadata({PARQUET_KEY: EMPTY})
    data = bytearray(sink.getvalue())
    start, end = _find_seal(data)
    data[start:end] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def open_parquet(where: str, stream: BinaryIO, *, hint: str) -> BinaryIO:
    """Return a Parquet file to read from: verified bytes if it has a seal, else `stream`."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - TAIL))
    has_seal = PARQUET_KEY in stream.read()
    stream.seek(0)
    if not has_seal:
        return stream
    data = stream.read()
    check_parquet(where, data, hint=hint)
    return io.BytesIO(data)


def check_parquet(where: str, data: bytes, *, hint: str) -> None:
    """Raise unless a Parquet file's seal matches its bytes."""
    try:
        start, end = _find_seal(data)
    except ValueError:
        raise _damaged(where, hint) from None
    blanked = b"".join([data[:start], EMPTY, data[end:]])
    if hashlib.sha256(blanked).hexdigest().encode() != data[start:end]:
        raise _damaged(where, hint)


def _find_seal(data: bytes | bytearray) -> tuple[int, int]:
    """Return a Parquet seal's range of bytes, in the metadata at the end; raise ValueError."""
    match = PARQUET_SEAL.search(data, data.rindex(PARQUET_KEY))
    if match is None:
        raise ValueError("no seal follows its key")
    return match.span(1)


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _damaged(where: str, hint: str) -> IntegrityError:
    return IntegrityError(f"{where} is damaged: its content does not match its hash", hint=hint)
