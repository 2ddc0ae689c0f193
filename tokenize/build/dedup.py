"""Exact deduplication: of byte-equal documents, the first one stays.

    1. each task notes the digests of its documents         (tasks, in parallel)
    2. digests are sorted; all but the first of each fall   (here, a part of the digests at a time)
    3. each task leaves out what has fallen                 (when it tokenizes)

"First" is by the order of the corpus, and by the order of generations: which worker was faster
decides nothing. The digests of what stays are kept beside the dataset for its next generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...dataplane.storage import storage
from .settings import DIGESTS, BuildJob, work_url
from .task_state import Event, Record
from .tasks import BuildTask, Task

DIGEST = 16
PART_BYTES = 256 << 20
"""How many bytes of digests are sorted at once."""

Digests = npt.NDArray[np.uint64]
"""[documents, 2]"""


@dataclass(frozen=True)
class DigestTask:
    """Notes the digest of each document of a task."""

    job: BuildJob

    def __call__(self, task: Task) -> Iterator[Event]:
        where = digests_url(self.job, task)
        if storage.exists(where):
            yield Event(task.id, bytes=task.size, done=True)
            return
        parts = []
        for _, texts in BuildTask(self.job).reader.read(task.slices, Record({})):
            parts += [
                hashlib.blake2b(text.encode(), digest_size=DIGEST).digest() for text in texts.texts
            ]
            yield Event(task.id, texts.size, len(texts.texts))
        storage.write(where, b"".join(parts))
        yield Event(task.id, done=True)


@dataclass(frozen=True)
class Kept:
    """What deduplication has decided."""

    drops: list[npt.NDArray[np.int64]]
    """Of each task, the numbers of the documents that it leaves out."""
    digests: list[bytes]
    """Of the documents that stay, sorted, in parts."""


def decide(job: BuildJob, tasks: Sequence[Task], before: Sequence[bytes]) -> Kept:
    """Which documents stay; `before` holds the digests of earlier generations."""
    sizes = [storage.size(digests_url(job, task)) for task in tasks]
    parts = max(1, -(-sum(sizes) // PART_BYTES))
    drops: list[list[npt.NDArray[np.int64]]] = [[] for _ in tasks]
    kept = []
    for part in range(parts):
        low, high = part * 2**64 // parts, (part + 1) * 2**64 // parts
        arrays, owners, numbers = [], [], []
        for data in before:
            old, _ = _between(data, low, high)
            arrays.append(old)
            owners.append(np.full(len(old), -1))
            numbers.append(np.zeros(len(old), np.int64))
        for owner, task in enumerate(tasks):
            new, number = _between(storage.read(digests_url(job, task)), low, high)
            arrays.append(new)
            owners.append(np.full(len(new), owner))
            numbers.append(number)
        digests = np.concatenate(arrays)
        owner_of, number_of = np.concatenate(owners), np.concatenate(numbers)
        # lexsort is stable: equal digests stay in the order of the corpus.
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        digests, owner_of, number_of = digests[order], owner_of[order], number_of[order]
        again = np.zeros(len(digests), bool)
        again[1:] = np.all(digests[1:] == digests[:-1], axis=1)
        kept.append(digests[~again & (owner_of >= 0)].tobytes())
        fallen_owners = np.unique(owner_of[again])
        assert not len(fallen_owners) or fallen_owners[0] >= 0  # what is kept has no duplicates
        for owner in fallen_owners:
            drops[owner].append(number_of[again & (owner_of == owner)])
    return Kept(
        [np.sort(np.concatenate([np.empty(0, np.int64), *fallen])) for fallen in drops],
        [data for data in kept if data],
    )


def digests_url(job: BuildJob, task: Task) -> str:
    return work_url(job.url, DIGESTS, f"{task.id}.bin")


def _between(data: bytes, low: int, high: int) -> tuple[Digests, npt.NDArray[np.int64]]:
    """The digests whose first half lies in [low, high), and their numbers."""
    digests = np.frombuffer(data, np.uint64).reshape(-1, 2)
    inside = digests[:, 0] >= low
    if high < 2**64:
        inside &= digests[:, 0] < high
    numbers = np.flatnonzero(inside)
    return digests[numbers], numbers
