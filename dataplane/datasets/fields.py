"""Kept document fields: Arrow columns in a file beside each shard, a row per document.

    fields/<hash>.arrow        url: string    language: string    score: double    …

`Shard.details["fields"]` names the file and holds its hashes, so the shard table covers it, and
thereby the dataset's hash. Reading a range of documents does not read the whole file.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

from ...console.errors import IntegrityError
from ..storage import storage
from .chunks import ChunkHasher
from .manifest import Shard
from .shard_file import UncachedShardFile

FOLDER = "fields"
KEY = "fields"
"""Key of `Shard.details`."""
BATCH_ROWS = 4096
"""Documents per record batch, the unit of reading."""


def encode(table: Any) -> bytes:
    """Return the content of a fields file."""
    import pyarrow as pa

    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=BATCH_ROWS)
    return sink.getvalue()


def write(url: str, folder: str, table: Any) -> dict[str, Any]:
    """Write a fields file, named by its content; return its entry for `Shard.details`."""
    data = encode(table)
    hasher = ChunkHasher()
    hasher.update(data)
    chunks, digest = hasher.finish()
    name = f"{folder}/{digest[:32]}.arrow"
    storage.write(storage.join(url, name), data)
    return {
        "name": name,
        "size": len(data),
        "hash": digest,
        "chunks": base64.b64encode(chunks).decode(),
    }


def fields_file(shard: Shard) -> Shard | None:
    """Return a shard's fields file as a `Shard`, so that chunks are verified alike; or None."""
    entry = shard.details.get(KEY)
    if entry is None:
        return None
    return Shard(
        name=entry["name"],
        size=entry["size"],
        documents=shard.documents,
        tokens=0,
        hash=entry["hash"],
        chunks=base64.b64decode(entry["chunks"]),
        task=shard.task,
    )


class FieldsReader:
    """Reads document fields from one shard; what was read is verified and kept."""

    def __init__(self, url: str, file: Shard) -> None:
        import pyarrow as pa

        self.file = file
        self._where = storage.join(url, file.name)
        self._source = UncachedShardFile(url, file)
        try:
            self._batches = pa.ipc.open_file(pa.PythonFile(_VerifiedFile(self._source), mode="r"))
        except pa.ArrowInvalid as error:
            raise IntegrityError(f"{self._where} is not a fields file: {error}") from None

    def rows(self, first: int, end: int) -> Any:
        """Return a table with the fields of the documents [first, end), counted in the shard."""
        import pyarrow as pa

        if end - first > BATCH_ROWS:
            self._source.read(0, self.file.size)  # a single request, not one per batch
        numbers = range(first // BATCH_ROWS, -(-end // BATCH_ROWS))
        batches = [self._batches.get_batch(number) for number in numbers]
        table = pa.Table.from_batches(batches, self._batches.schema)
        start = numbers.start * BATCH_ROWS
        rows = table.slice(first - start, end - first)
        if len(rows) != end - first:
            raise IntegrityError(
                f"{self._where} has no fields of the documents {first:,} to {end:,}",
                hint="check the dataset with `tokenize verify URL`",
            )
        return rows


class _VerifiedFile(io.RawIOBase):
    """Verified bytes as a file object for pyarrow."""

    def __init__(self, source: UncachedShardFile) -> None:
        self.source = source
        self.size = source.shard.size
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        )
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        end = self.size if size is None or size < 0 else min(self.size, self.position + size)
        data = self.source.read(self.position, end)
        self.position = end
        return data


def format_fields(fields: dict[str, Any]) -> str:
    """Format a document's fields in one line."""
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in fields.items())
