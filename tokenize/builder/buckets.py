"""Shuffle a build that is too large for shuffle.py: two passes through buckets.

A bucket is a range of keys. The first pass writes large spills, bucket by bucket. The second pass
reads a whole bucket, which is a contiguous piece of every spill, sorts it by key and writes shards.
The order is the same as in shuffle.py: it depends on the seed and the corpus alone.

    spill: piece of bucket 0 | piece of bucket 1 | … | table: a row per piece
    piece: sizes of three sections | documents (Arrow) | keys | kept fields (Arrow, if any)

Documents are read and written twice: corpus to spill, spill to shard. A worker holds a spill or a
bucket, a quarter of `shuffle_memory`, and a copy of it.
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
from .shuffle import GatherTask, KeyedDocuments, Keys, Spills, hash_documents, read_documents
from .task_state import TaskEvent, TaskState
from .writing import HashedFile, reorder, write_shard

log = get_logger(__name__)

ROW = np.dtype([("start", "<i8"), ("end", "<i8"), ("digest", "<u8", (2,))])
"""Row in a spill's table: a piece's place and hash."""
HINT = f"remove the folder {WORK} and run the same command again"


@dataclass(frozen=True)
class BucketWorker:
    """Turns buckets into shards."""

    job: BuildJob
    spills: Spills

    def __call__(self, task: GatherTask) -> Iterator[TaskEvent]:
        state = TaskState.load(self.job.url, task.id, [task.output])
        if not state.done:
            url = dataset_url(self.job.url, task.output)
            spills = self.spills[task.output]
            pieces = [
                piece
                for spill in spills
                for piece in _read_pieces(url, spill, task.first, task.end)
            ]
            if pieces:
                documents = ShardDocuments.concatenate([piece.documents for piece in pieces])
                order = np.argsort(np.concatenate([piece.keys for piece in pieces]), kind="stable")
                del pieces
                for first, end in self._cuts(documents, order):
                    shuffled = reorder(documents, order[first:end])
                    shard = write_shard(url, shuffled, self.job, task.id)
                    state.outputs[task.output].shards.append(shard)
            state.done = True
            state.save(self.job.url, task.id)
        yield TaskEvent(task.id, bytes=task.size, done=True)

    def _cuts(self, documents: ShardDocuments, order: Any) -> list[tuple[int, int]]:
        """Cut a bucket into shards of about equal size."""
        ends = np.cumsum(np.diff(documents.starts)[order])
        count = max(1, -(-documents.size // self.job.shard_size))
        targets = np.arange(1, count) * (int(ends[-1]) / count)
        edges = [0, *(np.searchsorted(ends, targets) + 1).tolist(), len(order)]
        return [(a, b) for a, b in pairwise(edges) if a < b]


def plan_bucket_tasks(job: BuildJob, all_spills: Spills) -> list[GatherTask]:
    """Plan the tasks that turn spills into shards."""
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
        spills_hash = hashlib.sha256("\n".join(shard.name for shard in spills).encode()).hexdigest()
        for number in range(count if spills else 0):
            first, end = number * job.buckets // count, (number + 1) * job.buckets // count
            text = json.dumps([spills_hash, name, first, end, job.identity()], sort_keys=True)
            id = hashlib.sha256(text.encode()).hexdigest()[:32]
            tasks.append(GatherTask(id, name, first, end, total // count))
    return tasks


def count_buckets(job: BuildJob, corpus: int, compressed: int, width: int) -> int:
    """Return how many buckets a corpus needs, given the bytes in plain and compressed files.

    A token has at least one byte of text, so a plain file's tokens take at most `width` times its
    size. Too many buckets do no harm: a task of the second pass reads several at once.
    """
    return max(1, -(-(corpus + 4 * compressed) * width // job.spill_size))


def write_bucketed_spill(url: str, documents: ShardDocuments, job: BuildJob, task: str) -> Shard:
    """Write documents bucket by bucket, then the pieces' table."""
    assert job.buckets is not None
    keys = hash_documents(documents, job.seed)
    order = np.argsort(keys, kind="stable")
    keys, size = keys[order], documents.size
    documents = reorder(documents, order)
    numbers = (keys >> np.uint64(32)) * np.uint64(job.buckets) >> np.uint64(32)
    bounds = np.searchsorted(numbers, np.arange(job.buckets + 1, dtype=np.uint64)).tolist()
    table = np.zeros(job.buckets, ROW)
    folder = f"{WORK}/{SPILLS}"
    out = HashedFile(url, folder)
    try:
        for number, (first, end) in enumerate(pairwise(bounds)):
            piece_start = out.hasher.size
            piece = _encode(documents[first:end], keys[first:end]) if first < end else b""
            if piece:
                out.write(piece)
            piece_end = out.hasher.size
            table[number] = (piece_start, piece_end, _digest(piece, piece_start, piece_end))
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
    """Hash a piece together with its place, so that a zeroed row of the table fits no piece."""
    place = np.array([start, end], "<i8").tobytes()
    return np.frombuffer(hashlib.blake2b(piece, digest_size=16, salt=place).digest(), "<u8")


def _encode(documents: ShardDocuments, keys: Keys) -> bytes:
    arrow = io.BytesIO()
    shard_format("arrow").write(cast(BinaryIO, arrow), documents)
    encoded_fields = b"" if documents.fields is None else fields.encode(documents.fields)
    sections = [arrow.getvalue(), keys.tobytes(), encoded_fields]
    return b"".join([np.array([len(section) for section in sections], "<i8").tobytes(), *sections])


def _read_pieces(url: str, spill: Shard, first: int, end_piece: int) -> Iterator[KeyedDocuments]:
    """Read pieces [first, end) from a spill with two requests."""
    location = storage.join(url, spill.name)
    table_start = spill.size - ROW.itemsize * int(spill.details["buckets"])
    rows_start = table_start + ROW.itemsize * first
    rows = read_checked(
        location,
        lambda data: _check_rows(location, data, end_piece - first),
        rows_start,
        rows_start + ROW.itemsize * (end_piece - first),
    )
    low, high = int(rows["start"][0]), int(rows["end"][-1])

    def check(data: bytes) -> list[memoryview]:
        view = memoryview(data)
        pieces = []
        for start, end, digest in rows.tolist():
            piece = view[start - low : end - low]
            if not np.array_equal(_digest(piece, start, end), digest):
                raise _damage_error(location)
            pieces.append(piece)
        return [piece for piece in pieces if piece]

    if low == high:
        check(b"")
        return
    for piece in read_checked(location, check, low, high):
        yield _decode(piece, str(spill.details["dtype"]))


def _check_rows(location: str, data: bytes, count: int) -> Any:
    """Parse rows from a spill's table; raise IntegrityError unless pieces are consecutive."""
    if len(data) != count * ROW.itemsize:
        raise _damage_error(location)
    rows = np.frombuffer(data, ROW)
    if (rows["end"] < rows["start"]).any() or (rows["end"][:-1] != rows["start"][1:]).any():
        raise _damage_error(location)
    return rows


def _damage_error(location: str) -> IntegrityError:
    return IntegrityError(f"{location} is damaged: its content does not match its hash", hint=HINT)


def _decode(piece: memoryview, dtype: str) -> KeyedDocuments:
    import pyarrow as pa

    sizes = np.frombuffer(piece[:24], "<i8").tolist()
    ends = (24 + np.cumsum(sizes)).tolist()
    arrow, keys = piece[24 : ends[0]], piece[ends[0] : ends[1]]
    table = None
    if len(encoded_fields := piece[ends[1] : ends[2]]):
        table = pa.ipc.open_file(pa.py_buffer(encoded_fields)).read_all()
    key_array = np.frombuffer(keys, np.uint64)

    def read(start: int, end: int) -> bytes:
        return bytes(arrow[start:end])

    documents = read_documents(read, len(arrow), np.dtype(dtype), 0, len(key_array))
    return KeyedDocuments(replace(documents, fields=table), key_array)
