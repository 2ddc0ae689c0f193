"""Exact deduplication: keep the first of byte-equal documents.

    1. tasks save the digests of their documents            (in parallel)
    2. sort the digests; all but the first of equal ones
       are duplicates                                       (here, one range of digests at a time)
    3. tasks leave out duplicates                           (when they tokenize)

"First" means the order of generations and of the corpus, never the speed of workers. Digests of
kept documents are stored with the dataset, for later generations.
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
"""Digest bytes sorted at once."""

Digests = npt.NDArray[np.uint64]
"""[documents, 2]"""


@dataclass(frozen=True)
class DigestWorker:
    """Saves digests for a task's documents."""

    job: BuildJob

    def __call__(self, task: Task) -> Iterator[TaskEvent]:
        url = digests_url(self.job, task)
        if storage.exists(url):
            yield TaskEvent(task.id, bytes=task.size, done=True)
            return
        digests = []
        for _, texts in TokenizeWorker(self.job).reader.read(task.slices, ReadStats()):
            digests += [
                hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
                for text in texts.texts
            ]
            yield TaskEvent(task.id, texts.size, len(texts.texts))
        write_digests(url, b"".join(digests))
        yield TaskEvent(task.id, done=True)


@dataclass(frozen=True)
class DedupResult:
    """Duplicates to drop, and digests to keep."""

    drops: list[npt.NDArray[np.int64]]
    """Document numbers of duplicates, by task."""
    digests: list[bytes]
    """Kept documents' digests, sorted, in consecutive ranges."""


def find_duplicates(
    job: BuildJob,
    tasks: Sequence[Task],
    earlier_digests: Sequence[bytes],
    sort_bytes: int = SORT_BYTES,
) -> DedupResult:
    """Find the duplicates of all tasks, sorting about `sort_bytes` of digests at once.
    `earlier_digests`: of earlier generations."""
    sizes = [storage.size(digests_url(job, task)) for task in tasks]
    ranges = max(1, -(-sum(sizes) // sort_bytes))
    drops: list[list[npt.NDArray[np.int64]]] = [[] for _ in tasks]
    kept_digests = []
    for number in range(ranges):
        low, high = number * 2**64 // ranges, (number + 1) * 2**64 // ranges
        arrays, owners, numbers = [], [], []
        for data in earlier_digests:
            earlier, _ = _select_range(data, low, high)
            arrays.append(earlier)
            owners.append(np.full(len(earlier), -1))
            numbers.append(np.zeros(len(earlier), np.int64))
        for owner, task in enumerate(tasks):
            current, document_numbers = _select_range(
                read_digests(digests_url(job, task)), low, high
            )
            arrays.append(current)
            owners.append(np.full(len(current), owner))
            numbers.append(document_numbers)
        digests = np.concatenate(arrays)
        owner_array, number_array = np.concatenate(owners), np.concatenate(numbers)
        # lexsort is stable: equal digests stay in the order of the corpus.
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        digests, owner_array, number_array = digests[order], owner_array[order], number_array[order]
        is_duplicate = np.zeros(len(digests), bool)
        is_duplicate[1:] = np.all(digests[1:] == digests[:-1], axis=1)
        kept_digests.append(digests[~is_duplicate & (owner_array >= 0)].tobytes())
        affected = np.unique(owner_array[is_duplicate])
        assert not len(affected) or affected[0] >= 0  # kept digests are unique
        for owner in affected:
            drops[owner].append(number_array[is_duplicate & (owner_array == owner)])
    return DedupResult(
        [np.sort(np.concatenate([np.empty(0, np.int64), *duplicates])) for duplicates in drops],
        [data for data in kept_digests if data],
    )


def digests_url(job: BuildJob, task: Task) -> str:
    return work_url(job.url, DIGESTS, f"{task.id}.digests")


def write_digests(url: str, digests: bytes) -> None:
    """Write document digests, followed by their sha256."""
    storage.write(url, digests + hashlib.sha256(digests).digest())


def read_digests(url: str) -> bytes:
    def check(data: bytes) -> bytes:
        digests, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if hashlib.sha256(digests).digest() != seal:
            raise IntegrityError(
                f"{url} is damaged: its {len(data):,} bytes do not match their hash",
                hint="remove the file and run the same command again: its task is run again",
            )
        return digests

    return read_checked(url, check)


def _select_range(data: bytes, low: int, high: int) -> tuple[Digests, npt.NDArray[np.int64]]:
    """Return the digests with a first half in [low, high), and their numbers."""
    digests = np.frombuffer(data, np.uint64).reshape(-1, 2)
    in_range = digests[:, 0] >= low
    if high < 2**64:
        in_range &= digests[:, 0] < high
    numbers = np.flatnonzero(in_range)
    return digests[numbers], numbers
