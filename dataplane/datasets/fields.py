"""Kept fields of documents: Arrow columns in a file beside each shard, one row for each document.

    fields/<hash>.arrow        url: string    language: string    score: double    …

`Shard.details["fields"]` names the file and holds its hashes, so that the shard table, and with it
the hash of the dataset, covers it. A range of documents is read without the rest of the file.
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
"""Documents of a record batch: the unit that is read."""


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


def file_of(shard: Shard) -> Shard | None:
    """Return the fields file of a shard as a shard, whose chunks are verified alike; or None."""
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
    """Reads the fields of the documents of one shard; what was read is verified and kept."""

    def __init__(self, url: str, file: Shard) -> None:
        import pyarrow as pa

        self.file = file
        self._where = storage.join(url, file.name)
        self._source = UncachedShardFile(url, file)
        try:
            self._batches = pa.ipc.open_file(pa.PythonFile(_Ranges(self._source), mode="r"))
        except pa.ArrowInvalid as error:
            raise IntegrityError(f"{self._where} is not a fields file: {error}") from None

    def rows(self, first: int, last: int) -> Any:
        """Return the fields of the documents [first, last) of the shard, as a table."""
        import pyarrow as pa

        if last - first > BATCH_ROWS:
            self._source.read(0, self.file.size)  # one request instead of one for each batch
        numbers = range(first // BATCH_ROWS, -(-last // BATCH_ROWS))
        batches = [self._batches.get_batch(number) for number in numbers]
        table = pa.Table.from_batches(batches, self._batches.schema)
        start = numbers.start * BATCH_ROWS
        part = table.slice(first - start, last - first)
        if len(part) != last - first:
            raise IntegrityError(
                f"{self._where} has no fields of the documents {first:,} to {last:,}",
                hint="check the dataset with `tokenize verify URL`",
            )
        return part


class _Ranges(io.RawIOBase):
    """Verified bytes of a file, as a file that pyarrow can seek in."""

    def __init__(self, source: UncachedShardFile) -> None:
        self.source = source
        self.size = source.shard.size
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        end = self.size if size is None or size < 0 else min(self.size, self.at + size)
        data = self.source.read(self.at, end)
        self.at = end
        return data


def as_text(fields: dict[str, Any]) -> str:
    """Return the fields of a document in one line."""
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in fields.items())
