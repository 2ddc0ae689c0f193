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
            beside = fields.FOLDER if folder == "shards" else folder
            details[fields.KEY] = fields.write(url, beside, documents.fields)
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
    """A new file, hashed while it is written: its name depends on its content. A local file is
    written to the folder that it will be renamed in, a remote file to memory."""

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

    def writelines(self, parts: Any) -> None:
        joined = b"".join(parts)
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


def _compress(data: bytes, how: str) -> bytes:
    import zstandard

    level = int(how.partition(":")[2] or 3)
    return zstandard.ZstdCompressor(level=level).compress(data)


def split_long(documents: ShardDocuments, limit: int) -> ShardDocuments:
    """Split documents longer than `limit` tokens; each piece ends with the end-of-document id."""
    lengths = np.diff(documents.starts)
    if not len(lengths) or lengths.max() <= limit:
        return documents
    # The last token of a document is its end; the others are cut into pieces of limit - 1.
    counts = np.maximum(1, -(-(lengths - 1) // (limit - 1)))
    owner = np.repeat(np.arange(len(documents)), counts)
    order = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = documents.starts[:-1][owner] + order * (limit - 1)
    body = np.minimum(limit - 1, documents.starts[1:][owner] - 1 - first)
    spans = list(zip(first.tolist(), (first + body).tolist(), strict=True))
    end = documents.tokens[documents.starts[1] - 1 : documents.starts[1]]
    tokens: Any = np.concatenate([part for a, b in spans for part in (documents.tokens[a:b], end)])
    weights = documents.weights
    if weights is not None:
        full = np.zeros(1, np.uint8)  # code of loss weight 1
        weights = np.concatenate([part for a, b in spans for part in (weights[a:b], full)])
    starts = np.concatenate([[0], np.cumsum(body + 1)])
    before = 0 if documents.piece is None else documents.piece[owner]
    return ShardDocuments(
        tokens=tokens,
        starts=starts,
        files=documents.files,
        file=documents.file[owner],
        position=documents.position[owner],
        ids=None if documents.ids is None else tuple(documents.ids[k] for k in owner.tolist()),
        weights=weights,
        piece=before + order,
        fields=None if documents.fields is None else documents.fields.take(owner),
    )


def take(documents: ShardDocuments, order: npt.NDArray[np.int64]) -> ShardDocuments:
    """Return the documents in another order."""
    bounds = documents.starts.tolist()
    parts = [slice(bounds[k], bounds[k + 1]) for k in order.tolist()]
    tokens: Any = np.concatenate([documents.tokens[:0], *(documents.tokens[p] for p in parts)])
    weights = documents.weights
    if weights is not None:
        weights = np.concatenate([weights[:0], *(weights[p] for p in parts)])
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
