"""Write documents as shards, atomically and named by their content."""

from __future__ import annotations

import contextlib
import hashlib
import io
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from ...dataplane.datasets import fields
from ...dataplane.datasets.chunks import ChunkHasher
from ...dataplane.datasets.manifest import Shard
from ...dataplane.shards import shard_format
from ...dataplane.shards.documents import ShardDocuments
from ...dataplane.storage import storage
from ...dataplane.storage.faults import storage_error
from .settings import BuildJob


def write_shard(
    url: str, documents: ShardDocuments, job: BuildJob, task: str, *, folder: str = "shards"
) -> Shard:
    """Write documents as one shard, named by its content."""
    out = HashedFile(url, folder)
    try:
        shard_format(job.format).write(cast(BinaryIO, out), documents)
        chunks, digest = out.hasher.finish()
        name = f"{folder}/{digest[:32]}.{job.format}"
        details = {}
        if documents.fields is not None:
            fields_folder = fields.FOLDER if folder == "shards" else folder
            details[fields.KEY] = fields.write(url, fields_folder, documents.fields)
        shard = Shard(
            name=name,
            size=out.hasher.size,
            documents=len(documents),
            tokens=len(documents.tokens),
            hash=digest,
            chunks=chunks,
            task=task,
            details=details,
        )
        if not job.compression:
            out.move(storage.join(url, name))
            return shard
        stored = _compress(out.read(), job.compression)
    except OSError as error:
        raise storage_error("write", storage.join(url, folder), error) from None
    finally:
        out.discard()
    storage.write(storage.join(url, f"{name}.zstd"), stored)
    return replace(
        shard,
        stored_name=f"{name}.zstd",
        stored_size=len(stored),
        stored_hash=hashlib.sha256(stored).hexdigest(),
    )


class HashedFile:
    """A new file, hashed while it is written, because its name depends on its content. A local file
    is written into its final folder, then renamed; a remote file is kept in memory."""

    closed = False

    def __init__(self, url: str, folder: str) -> None:
        self.hasher = ChunkHasher()
        self.path: Path | None = None
        self.file: BinaryIO = io.BytesIO()
        if storage.is_local(url):
            parent = storage.local_path(storage.join(url, folder))
            parent.mkdir(parents=True, exist_ok=True)
            self.path = parent / f".new.{uuid.uuid4().hex[:8]}.tmp"
            self.file = self.path.open("wb+")

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        self.file.write(data)
        return len(data)

    def writelines(self, lines: Any) -> None:
        joined = b"".join(lines)
        self.write(joined)

    def flush(self) -> None:
        self.file.flush()

    def read(self) -> bytes:
        self.file.seek(0)
        return self.file.read()

    def move(self, url: str) -> None:
        if self.path is None:
            storage.write(url, self.read())
            return
        self.file.close()
        storage.put(self.path, url)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # close() flushes; the disk may be full
            self.file.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _compress(data: bytes, compression: str) -> bytes:
    import zstandard

    level = int(compression.partition(":")[2] or 3)
    return zstandard.ZstdCompressor(level=level).compress(data)


def split_long(documents: ShardDocuments, limit: int) -> ShardDocuments:
    """Split documents longer than `limit` tokens; every piece ends with the end-of-document id."""
    lengths = np.diff(documents.starts)
    if not len(lengths) or lengths.max() <= limit:
        return documents
    # The last token of a document is its end; all other tokens are cut into pieces of limit - 1.
    counts = np.maximum(1, -(-(lengths - 1) // (limit - 1)))
    source_documents = np.repeat(np.arange(len(documents)), counts)
    piece_numbers = np.arange(len(source_documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    piece_starts = documents.starts[:-1][source_documents] + piece_numbers * (limit - 1)
    body_lengths = np.minimum(limit - 1, documents.starts[1:][source_documents] - 1 - piece_starts)
    spans = list(zip(piece_starts.tolist(), (piece_starts + body_lengths).tolist(), strict=True))
    end = documents.tokens[documents.starts[1] - 1 : documents.starts[1]]
    tokens: Any = np.concatenate([ids for a, b in spans for ids in (documents.tokens[a:b], end)])
    weights = documents.weights
    if weights is not None:
        full_code = np.zeros(1, np.uint8)  # code of loss weight 1
        weights = np.concatenate([ids for a, b in spans for ids in (weights[a:b], full_code)])
    starts = np.concatenate([[0], np.cumsum(body_lengths + 1)])
    earlier_pieces = 0 if documents.piece is None else documents.piece[source_documents]
    return ShardDocuments(
        tokens=tokens,
        starts=starts,
        files=documents.files,
        file=documents.file[source_documents],
        position=documents.position[source_documents],
        ids=None
        if documents.ids is None
        else tuple(documents.ids[k] for k in source_documents.tolist()),
        weights=weights,
        piece=earlier_pieces + piece_numbers,
        fields=None if documents.fields is None else documents.fields.take(source_documents),
    )


def reorder(documents: ShardDocuments, order: npt.NDArray[np.int64]) -> ShardDocuments:
    """Reorder documents: document k of the result is `order[k]`."""
    bounds = documents.starts.tolist()
    slices = [slice(bounds[k], bounds[k + 1]) for k in order.tolist()]
    tokens: Any = np.concatenate([documents.tokens[:0], *(documents.tokens[p] for p in slices)])
    weights = documents.weights
    if weights is not None:
        weights = np.concatenate([weights[:0], *(weights[p] for p in slices)])
    return ShardDocuments(
        tokens=tokens,
        starts=np.concatenate([[0], np.cumsum(np.diff(documents.starts)[order])]),
        files=documents.files,
        file=documents.file[order],
        position=documents.position[order],
        ids=None if documents.ids is None else tuple(documents.ids[k] for k in order.tolist()),
        weights=weights,
        piece=None if documents.piece is None else documents.piece[order],
        fields=None if documents.fields is None else documents.fields.take(order),
    )
