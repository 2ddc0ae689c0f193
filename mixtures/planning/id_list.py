"""Lists of document ids: a text file with an id a line, or a column `id`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from io import BytesIO

from ...console.errors import InputError
from ...dataplane.storage import storage


def read_ids(url: str) -> list[str]:
    """Read the ids in a text file, one a line, or in the column `id` of a Parquet or JSON lines
    file."""
    data = storage.read(url)
    try:
        if url.endswith((".parquet", ".pq")):
            ids = _parquet_ids(data)
        elif url.endswith((".jsonl", ".ndjson")):
            ids = _texts(json.loads(line)["id"] for line in _lines(data))
        else:
            ids = list(_lines(data))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(
            f"{url} is no list of ids: {error!r:.200}",
            hint="a list is a text file with an id a line, or has a column `id` (.jsonl, .parquet)",
        ) from None
    if not ids:
        raise InputError(f"the list of ids {url} is empty")
    return ids


def _parquet_ids(data: bytes) -> list[str]:
    import pyarrow.parquet as pq

    return _texts(pq.read_table(BytesIO(data), columns=["id"]).column("id").to_pylist())


def _texts(ids: Iterable[object]) -> list[str]:
    """Return ids as text, without nulls: documents without an id."""
    return [str(id) for id in ids if id is not None]


def _lines(data: bytes) -> Iterator[str]:
    # A text in JSON may hold U+2028 and other marks at which splitlines would cut.
    return (line.strip() for line in data.decode("utf-8-sig").split("\n") if line.strip())
