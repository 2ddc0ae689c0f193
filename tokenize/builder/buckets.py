"""Shuffle a build that is too large for shuffle.py: two passes through buckets.

A bucket is a range of keys. The first pass writes each large spill bucket by bucket. The second
pass reads a whole bucket, a contiguous piece of each spill, sorts it by key and writes its shards.
The order is that of shuffle.py: it depends on the seed and the corpus alone.

    spill: piece of bucket 0 | piece of bucket 1 | … | table: a row for each piece
    piece: sizes of its three parts | documents (Arrow) | keys | kept fields (Arrow, if any)

Each document is read and written twice: the corpus and the spill, the spill and the shard. A
worker holds a spill or a bucket, each a quarter of `shuffle_memory`, and a copy of it.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO, cast

import numpy as np

from ...console.errors import IntegrityError
from ...console.log import get_logger
from ...dataplane.datasets import fields
from ...dataplane.datasets.manifest import Shard
from ...dataplane.shards import shard_format
from ...dataplane.shards.documents import ShardDocuments
from ...dataplane.storage import storage
from ...dataplane.storage.faults import storage_error
from ...dataplane.storage.verified import read_checked
from .settings import SPILLS, WORK, BuildJob, dataset_url
from .shuffle import GatherTask, KeyedDocuments, Keys, Spills, document_keys, read_documents
from .task_state import TaskEvent, TaskState
from .writing import HashedFile, take, write_shard

log = get_logger(__name__)

ROW = np.dtype([("start", "<i8"), ("end", "<i8"), ("digest", "<u8", (2,))])
"""Row of a spill's table: where a piece is, and its hash."""
HINT = f"remove the folder {WORK} and run the same command again"


@dataclass(frozen=True)
class BucketWorker:
    """Makes shards of buckets."""

    job: BuildJob
    spills: Spills

    def __call__(self, task: GatherTask) -> Iterator[TaskEvent]:
        state = TaskState.load(self.job.url, task.id, [task.output])
        if not state.done:
            url = dataset_url(self.job.url, task.output)
            spills = self.spills[task.output]
            parts = [part for spill in spills for part in _read(url, spill, task.first, task.last)]
            if parts:
                documents = ShardDocuments.concatenate([part.documents for part in parts])
                order = np.argsort(np.concatenate([part.keys for part in parts]), kind="stable")
                del parts
                for first, last in self._cuts(documents, order):
                    shuffled = take(documents, order[first:last])
                    shard = write_shard(url, shuffled, self.job, task.id)
                    state.outputs[task.output].shards.append(shard)
            state.done = True
            state.save(self.job.url, task.id)
        yield TaskEvent(task.id, bytes=task.size, done=True)

    def _cuts(self, documents: ShardDocuments, order: Any) -> list[tuple[int, int]]:
        """Cut a bucket into shards of about equal size."""
        ends = np.cumsum(np.diff(documents.starts)[order])
        count = max(1, -(-documents.size // self.job.shard_size))
        aims = np.arange(1, count) * (int(ends[-1]) / count)
        edges = [0, *(np.searchsorted(ends, aims) + 1).tolist(), len(order)]
        return [(a, b) for a, b in pairwise(edges) if a < b]


def bucket_tasks(job: BuildJob, all_spills: Spills) -> list[GatherTask]:
    """Return the tasks that turn spills into shards."""
    assert job.buckets is not None
    tasks = []
    for name, spills in all_spills.items():
        total = sum(shard.details["bytes"] for shard in spills)
        count = min(job.buckets, max(1, -(-total // job.spill_size)))
        if total > job.buckets * job.spill_size:
            log.warning(
                "the documents are larger than their files suggest: a worker holds %s bytes of "
                "them, not %s",
                f"{total // count:,}",
                f"{job.spill_size:,}",
            )
        names = hashlib.sha256("\n".join(shard.name for shard in spills).encode()).hexdigest()
        for number in range(count if spills else 0):
            first, last = number * job.buckets // count, (number + 1) * job.buckets // count
            text = json.dumps([names, name, first, last, job.identity()], sort_keys=True)
            id = hashlib.sha256(text.encode()).hexdigest()[:32]
            tasks.append(GatherTask(id, name, first, last, total // count))
    return tasks


def bucket_count(job: BuildJob, corpus: int, compressed: int, width: int) -> int:
    """Return the number of buckets of a corpus, from the bytes of its plain and compressed files.

    A token has at least a byte of text, so the tokens of a plain file are at most `width` times its
    size. There may be too many buckets: a task of the second pass reads several of them at once.
    """
    return max(1, -(-(corpus + 4 * compressed) * width // job.spill_size))


def write_bucketed_spill(url: str, documents: ShardDocuments, job: BuildJob, task: str) -> Shard:
    """Write documents bucket by bucket, then the table of the pieces."""
    assert job.buckets is not None
    keys = document_keys(documents, job.seed)
    order = np.argsort(keys, kind="stable")
    keys, size = keys[order], documents.size
    documents = take(documents, order)
    numbers = (keys >> np.uint64(32)) * np.uint64(job.buckets) >> np.uint64(32)
    bounds = np.searchsorted(numbers, np.arange(job.buckets + 1, dtype=np.uint64)).tolist()
    table = np.zeros(job.buckets, ROW)
    folder = f"{WORK}/{SPILLS}"
    out = HashedFile(url, folder)
    try:
        for number, (first, last) in enumerate(pairwise(bounds)):
            start = out.hasher.size
            piece = _encode(documents[first:last], keys[first:last]) if first < last else b""
            if piece:
                out.write(piece)
            end = out.hasher.size
            table[number] = (start, end, _digest(piece, start, end))
        out.write(table.tobytes())
        _, digest = out.hasher.finish()
        name = f"{folder}/{digest[:32]}.spill"
        out.move(storage.join(url, name))
    except OSError as error:
        raise storage_error("write", storage.join(url, folder), error) from None
    finally:
        out.discard()
    return Shard(
        name=name,
        size=out.hasher.size,
        documents=len(documents),
        tokens=len(documents.tokens),
        hash=digest,
        chunks=b"",  # each piece has its own hash
        task=task,
        details={"bytes": size, "dtype": documents.tokens.dtype.name, "buckets": job.buckets},
    )


def _digest(piece: bytes | memoryview, start: int, end: int) -> Any:
    """Return the hash of a piece and of its place: a zeroed row of the table fits no piece."""
    place = np.array([start, end], "<i8").tobytes()
    return np.frombuffer(hashlib.blake2b(piece, digest_size=16, salt=place).digest(), "<u8")


def _encode(documents: ShardDocuments, keys: Keys) -> bytes:
    arrow = io.BytesIO()
    shard_format("arrow").write(cast(BinaryIO, arrow), documents)
    beside = b"" if documents.fields is None else fields.encode(documents.fields)
    parts = [arrow.getvalue(), keys.tobytes(), beside]
    return b"".join([np.array([len(part) for part in parts], "<i8").tobytes(), *parts])


def _read(url: str, spill: Shard, first: int, last: int) -> Iterator[KeyedDocuments]:
    """Read the pieces [first, last) of a spill with two requests."""
    where = storage.join(url, spill.name)
    head = spill.size - ROW.itemsize * int(spill.details["buckets"])
    at = head + ROW.itemsize * first
    rows = read_checked(
        where, lambda data: _rows(where, data, last - first), at, at + ROW.itemsize * (last - first)
    )
    low, high = int(rows["start"][0]), int(rows["end"][-1])

    def check(data: bytes) -> list[memoryview]:
        view = memoryview(data)
        pieces = []
        for start, end, digest in rows.tolist():
            piece = view[start - low : end - low]
            if not np.array_equal(_digest(piece, start, end), digest):
                raise _damaged(where)
            pieces.append(piece)
        return [piece for piece in pieces if piece]

    if low == high:
        check(b"")
        return
    for piece in read_checked(where, check, low, high):
        yield _decode(piece, str(spill.details["dtype"]))


def _rows(where: str, data: bytes, count: int) -> Any:
    """Return rows of a spill's table; raise if they do not follow each other."""
    if len(data) != count * ROW.itemsize:
        raise _damaged(where)
    rows = np.frombuffer(data, ROW)
    if (rows["end"] < rows["start"]).any() or (rows["end"][:-1] != rows["start"][1:]).any():
        raise _damaged(where)
    return rows


def _damaged(where: str) -> IntegrityError:
    return IntegrityError(f"{where} is damaged: its content does not match its hash", hint=HINT)


def _decode(piece: memoryview, dtype: str) -> KeyedDocuments:
    import pyarrow as pa

    sizes = np.frombuffer(piece[:24], "<i8").tolist()
    ends = (24 + np.cumsum(sizes)).tolist()
    arrow, keys, beside = piece[24 : ends[0]], piece[ends[0] : ends[1]], piece[ends[1] : ends[2]]
    table = pa.ipc.open_file(pa.py_buffer(beside)).read_all() if len(beside) else None
    held = np.frombuffer(keys, np.uint64)

    def read(start: int, end: int) -> bytes:
        return bytes(arrow[start:end])

    documents = read_documents(read, len(arrow), np.dtype(dtype), 0, len(held))
    return KeyedDocuments(replace(documents, fields=table), held)
