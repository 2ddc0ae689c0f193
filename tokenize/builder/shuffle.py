"""Shuffle a whole build's documents, with the memory of one shard.

Documents, and pieces of split documents, have a key: a hash of seed and origin. Tasks write
tokenized documents as spills, sorted by key, with the keys in a file next to them. A shard of the
dataset is a range of keys, gathered from all spills. The order depends on the seed and the corpus
alone.

    tasks → spills (sorted by key, with an index of key ranges) → one shard per range
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dataplane.datasets import fields
from ...dataplane.datasets.chunks import ChunkHasher
from ...dataplane.datasets.manifest import Shard
from ...dataplane.datasets.shard_file import UncachedShardFile
from ...dataplane.order.epochs.permutation import mix
from ...dataplane.shards import shard_format
from ...dataplane.shards.documents import ShardDocuments
from ...dataplane.shards.format import Reader
from ...dataplane.storage import storage
from .settings import SPILLS, WORK, BuildJob, dataset_url
from .task_state import TaskEvent, TaskState
from .writing import reorder, write_shard

RANGES = 1 << 16
"""Key ranges in a spill's index. A shard consists of whole ranges."""

Keys = npt.NDArray[np.uint64]
Spills = Mapping[str, Sequence[Shard]]
"""All spills, by output. Workers hold them rather than tasks, so a worker receives them once."""


@dataclass(frozen=True)
class GatherTask:
    """Task that makes shards from ranges or buckets [first, end) in all spills."""

    id: str
    output: str
    first: int
    end: int
    size: int


@dataclass(frozen=True)
class KeyedDocuments:
    """Documents in a spill, with their keys."""

    documents: ShardDocuments
    keys: Keys


@dataclass(frozen=True)
class GatherWorker:
    """Gathers shards' documents from spills."""

    job: BuildJob
    spills: Spills

    def __call__(self, task: GatherTask) -> Iterator[TaskEvent]:
        state = TaskState.load(self.job.url, task.id, [task.output])
        if not state.done:
            spills = self.spills[task.output]
            pieces = [piece for spill in spills if (piece := self._read_range(spill, task))]
            if pieces:
                documents = ShardDocuments.concatenate([piece.documents for piece in pieces])
                keys = np.concatenate([piece.keys for piece in pieces])
                shuffled = reorder(documents, np.argsort(keys, kind="stable"))
                url = dataset_url(self.job.url, task.output)
                shard = write_shard(url, shuffled, self.job, task.id)
                state.outputs[task.output].shards.append(shard)
            state.done = True
            state.save(self.job.url, task.id)
        yield TaskEvent(task.id, bytes=task.size, done=True)

    def _read_range(self, spill: Shard, task: GatherTask) -> KeyedDocuments | None:
        """Read a spill's documents with keys in the task's range; None if there are none."""
        url = dataset_url(self.job.url, task.output)
        index = UncachedShardFile(url, _keys_file(spill))
        bounds = np.frombuffer(index.read(8 * task.first, 8 * task.end + 8), np.int64)
        first, end = int(bounds[0]), int(bounds[-1])
        if first == end:
            return None
        keys = index.read(8 * (RANGES + 1 + first), 8 * (RANGES + 1 + end))
        read = UncachedShardFile(url, spill).read
        dtype = np.dtype(str(spill.details["dtype"]))
        documents = read_documents(read, spill.size, dtype, first, end)
        if (fields_file := fields.fields_file(spill)) is not None:
            rows = fields.FieldsReader(url, fields_file).rows(first, end)
            documents = replace(documents, fields=rows)
        return KeyedDocuments(documents, np.frombuffer(keys, np.uint64))


def collect_spills(job: BuildJob, states: Sequence[TaskState]) -> Spills:
    """Collect finished tasks' spills."""
    return {
        name: [shard for state in states for shard in state.outputs[name].shards]
        for name in job.outputs
    }


def plan_gather_tasks(job: BuildJob, all_spills: Spills) -> list[GatherTask]:
    """Plan the tasks that turn spills into shards."""
    tasks = []
    for name, spills in all_spills.items():
        total = sum(shard.details["bytes"] for shard in spills)
        count = min(RANGES, max(1, -(-total // job.shard_size)))
        names = [shard.name for shard in spills]
        for number in range(count if spills else 0):
            first, end = number * RANGES // count, (number + 1) * RANGES // count
            text = json.dumps([names, name, first, end, job.identity()], sort_keys=True)
            id = hashlib.sha256(text.encode()).hexdigest()[:32]
            tasks.append(GatherTask(id, name, first, end, total // count))
    return tasks


def write_spill(url: str, documents: ShardDocuments, job: BuildJob, task: str) -> Shard:
    """Write documents sorted by key, and a file with the starts of key ranges and the keys."""
    keys = hash_documents(documents, job.seed)
    order = np.argsort(keys, kind="stable")
    arrow_job = replace(job, format="arrow", compression=None)
    spill = write_shard(url, reorder(documents, order), arrow_job, task, folder=f"{WORK}/{SPILLS}")
    edges = (np.arange(1, RANGES, dtype=np.uint64) * np.uint64(2**64 // RANGES)).astype(np.uint64)
    keys = keys[order]
    index = np.concatenate([[0], np.searchsorted(keys, edges), [len(keys)]]).astype(np.int64)
    data = index.tobytes() + keys.tobytes()
    storage.write(storage.join(url, f"{spill.name}.keys"), data)
    hasher = ChunkHasher()
    hasher.update(data)
    chunks, digest = hasher.finish()
    return replace(
        spill,
        details={
            **spill.details,
            "bytes": documents.size,
            "dtype": documents.tokens.dtype.name,
            "keys": {"hash": digest, "chunks": base64.b64encode(chunks).decode()},
        },
    )


def _keys_file(spill: Shard) -> Shard:
    """Describe a spill's file of keys as a shard: its chunks are verified like a shard's."""
    keys = spill.details["keys"]
    return Shard(
        name=f"{spill.name}.keys",
        size=8 * (RANGES + 1 + spill.documents),
        documents=0,
        tokens=0,
        hash=keys["hash"],
        chunks=base64.b64decode(keys["chunks"]),
    )


def hash_documents(documents: ShardDocuments, seed: int | None) -> Keys:
    """Return documents' keys: hashes over seed, file, position and piece."""
    names = [f"{seed}\0{name}".encode() for name in documents.files]
    digests = [hashlib.blake2b(name, digest_size=8).digest() for name in names]
    files = np.frombuffer(b"".join(digests), np.uint64)[documents.file]
    position = documents.position.astype(np.uint64)
    piece = np.uint64(0) if documents.piece is None else documents.piece.astype(np.uint64)
    with np.errstate(over="ignore"):
        return mix(mix(position * np.uint64(0x9E3779B97F4A7C15) + files) + piece)


def read_documents(
    read: Reader, size: int, dtype: np.dtype[Any], first: int, end: int
) -> ShardDocuments:
    """Read documents [first, end) from an Arrow file of `size` bytes, without kept fields; read
    little more than their bytes."""
    arrow_format = shard_format("arrow")
    layout = arrow_format.layout(read, size, dtype=dtype.name, details={})
    starts = layout.document_starts[first : end + 1]
    first_token, end_token = int(starts[0]), int(starts[-1])
    tokens, codes = [np.empty(0, dtype)], [np.empty(0, np.uint8)]
    for run in range(len(layout.run_bytes)):
        begin = max(first_token, int(layout.run_tokens[run])) - int(layout.run_tokens[run])
        count = (
            min(end_token, int(layout.run_tokens[run + 1])) - int(layout.run_tokens[run]) - begin
        )
        if count <= 0:
            continue
        offset = int(layout.run_bytes[run]) + begin * dtype.itemsize
        tokens.append(np.frombuffer(read(offset, offset + count * dtype.itemsize), dtype))
        if layout.weight_bytes is not None:
            offset = int(layout.weight_bytes[run]) + begin
            codes.append(np.frombuffer(read(offset, offset + count), np.uint8))
    origins = arrow_format.origins(read, size, first, end, details={})
    files = dict.fromkeys(origin.file for origin in origins)
    file_numbers = {name: k for k, name in enumerate(files)}
    all_tokens: Any = np.concatenate(tokens)
    return ShardDocuments(
        tokens=all_tokens,
        starts=starts - first_token,
        files=tuple(files),
        file=np.array([file_numbers[origin.file] for origin in origins], np.int32),
        position=np.array([origin.position for origin in origins], np.int64),
        ids=tuple(origin.id for origin in origins),
        weights=None if layout.weight_bytes is None else np.concatenate(codes),
    )
