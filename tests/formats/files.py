"""What a file on disk holds, as it is compared: keys and values, columns and rows, tensors."""

from __future__ import annotations

import hashlib
import json
import pickletools
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from formats.samples import masked

from headrace.dataplane.runlog import writer

RANDOM = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}|\.tmp$|^pathlib")
"""Words of a checkpoint's index that are random, or another version of Python's."""
PAGES = (".html", ".lock", ".md", ".png", ".sh")
"""Endings of files that no command reads."""


def content(file: Path, *, measured: bool) -> Any:
    """Return what a file holds. Of what a run has `measured`, times and floats are masked."""
    for ending, read in READERS.items():
        if file.name.endswith(ending):
            return masked(read(file), measured=measured)
    data = file.read_bytes()
    return hashlib.sha256(data).hexdigest()


def _json(file: Path) -> Any:
    return json.loads(file.read_text())


def _yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def _lines(file: Path) -> Any:
    return list(writer.read(file))


def _arrow(file: Path) -> Any:
    return _table(pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all())


def _parquet(file: Path) -> Any:
    return _table(pq.read_table(file))


def _table(table: pa.Table) -> Any:
    names = {key.decode() for key in table.schema.metadata or {}}
    columns = [f"{field.name}: {field.type}" for field in table.schema]
    rows = [{key: _plain(value) for key, value in row.items()} for row in table.to_pylist()]
    return {"metadata": sorted(names), "columns": columns, "rows": rows}


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _sqlite(file: Path) -> Any:
    database = sqlite3.connect(file)
    try:
        return [row[0] for row in database.execute("select sql from sqlite_master order by name")]
    finally:
        database.close()


def _safetensors(file: Path) -> Any:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return {"header": json.loads(data[8 : 8 + size])}


def _metadata(file: Path) -> Any:
    """Return the names in a checkpoint's index, a pickle: tensors, modules and classes."""
    names = {word for _, word, _ in pickletools.genops(file.read_bytes()) if isinstance(word, str)}
    return sorted(name for name in names if not RANDOM.search(name))


def _tensor_file(file: Path) -> Any:
    return "tensors"


READERS: dict[str, Callable[[Path], Any]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".yaml": _yaml,
    ".arrow": _arrow,
    ".parquet": _parquet,
    ".sqlite": _sqlite,
    ".safetensors": _safetensors,
    ".metadata": _metadata,
    ".distcp": _tensor_file,
}
