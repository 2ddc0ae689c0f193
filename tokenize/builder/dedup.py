"""Exact deduplication: keep the first of byte-equal documents.

    1. each task saves the digests of its documents         (tasks, in parallel)
    2. sort the digests; all but the first of equal ones
       are duplicates                                       (here, one range of digests at a time)
    3. each task leaves out its duplicates                  (when it tokenizes)

"First" is defined by the order of generations and of the corpus, never by the speed of workers.
The digests of the kept documents are stored beside the dataset for its next generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...console.errors import IntegrityError
from ...dataplane.storage import storage
from ...dataplane.storage.verified import read_checked
from ..corpus.read_stats import ReadStats
from .settings import DIGESTS, BuildJob, work_url
from .task_state import TaskEvent
from .tasks import Task, TokenizeWorker

DIGEST_BYTES = 16
SEAL_BYTES = 32
SORT_BYTES = 256 << 20
"""Bytes of digests that are sorted at once."""

Digests = npt.NDArray[np.uint64]
"""[documents, 2]"""


@dataclass(frozen=True)
class DigestWorker:
    """Saves the digests of the documents of a task."""

    job: BuildJob

    def __call__(self, task: Task) -> Iterator[TaskEvent]:
        where = digests_url(self.job, task)
        if storage.exists(where):
            yield TaskEvent(task.id, bytes=task.size, done=True)
            return
        digests = []
        for _, texts in TokenizeWorker(self.job).reader.read(task.slices, ReadStats()):
            digests += [
                hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
                for text in texts.texts
            ]
            yield TaskEvent(task.id, texts.size, len(texts.texts))
        write_digests(where, b"".join(digests))
        yield TaskEvent(task.id, done=True)


@dataclass(frozen=True)
class DedupResult:
    """Result of deduplication."""

    drops: list[npt.NDArray[np.int64]]
    """Numbers of the duplicates of each task."""
    digests: list[bytes]
    """Digests of the kept documents, sorted, in consecutive ranges."""


def find_duplicates(
    job: BuildJob, tasks: Sequence[Task], before: Sequence[bytes], sort_bytes: int = SORT_BYTES
) -> DedupResult:
    """Find the duplicates of all tasks; `before` holds the digests of earlier generations. About
    `sort_bytes` of digests are sorted at once."""
    sizes = [storage.size(digests_url(job, task)) for task in tasks]
    ranges = max(1, -(-sum(sizes) // sort_bytes))
    drops: list[list[npt.NDArray[np.int64]]] = [[] for _ in tasks]
    kept = []
    for number in range(ranges):
        low, high = number * 2**64 // ranges, (number + 1) * 2**64 // ranges
        arrays, owners, numbers = [], [], []
        for data in before:
            old, _ = _between(data, low, high)
            arrays.append(old)
            owners.append(np.full(len(old), -1))
            numbers.append(np.zeros(len(old), np.int64))
        for owner, task in enumerate(tasks):
            new, new_numbers = _between(read_digests(digests_url(job, task)), low, high)
            arrays.append(new)
            owners.append(np.full(len(new), owner))
            numbers.append(new_numbers)
        digests = np.concatenate(arrays)
        owner_of, number_of = np.concatenate(owners), np.concatenate(numbers)
        # lexsort is stable: equal digests stay in the order of the corpus.
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        digests, owner_of, number_of = digests[order], owner_of[order], number_of[order]
        duplicate = np.zeros(len(digests), bool)
        duplicate[1:] = np.all(digests[1:] == digests[:-1], axis=1)
        kept.append(digests[~duplicate & (owner_of >= 0)].tobytes())
        affected = np.unique(owner_of[duplicate])
        assert not len(affected) or affected[0] >= 0  # kept digests are unique
        for owner in affected:
            drops[owner].append(number_of[duplicate & (owner_of == owner)])
    return DedupResult(
        [np.sort(np.concatenate([np.empty(0, np.int64), *duplicates])) for duplicates in drops],
        [data for data in kept if data],
    )


def digests_url(job: BuildJob, task: Task) -> str:
    return work_url(job.url, DIGESTS, f"{task.id}.digests")


def write_digests(where: str, digests: bytes) -> None:
    """Write the digests of a task's documents, and their sha256 after them."""
    storage.write(where, digests + hashlib.sha256(digests).digest())


def read_digests(where: str) -> bytes:
    def check(data: bytes) -> bytes:
        digests, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if hashlib.sha256(digests).digest() != seal:
            raise IntegrityError(
                f"{where} is damaged: its {len(data):,} bytes do not match their hash",
                hint="remove the file and run the same command again: its task is run again",
            )
        return digests

    return read_checked(where, check)


def _between(data: bytes, low: int, high: int) -> tuple[Digests, npt.NDArray[np.int64]]:
    """Return the digests whose first half is in [low, high), and their numbers."""
    digests = np.frombuffer(data, np.uint64).reshape(-1, 2)
    inside = digests[:, 0] >= low
    if high < 2**64:
        inside &= digests[:, 0] < high
    numbers = np.flatnonzero(inside)
    return digests[numbers], numbers
