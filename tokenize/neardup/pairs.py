"""Second tasks: find documents that agree in a band.

A task compares the keys of one band in a range of keys, for all documents. Documents with one key
are pairs of the first of them with each other one: enough to find their cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.storage.verified import read_named, write_named
from .bands import RUN_AGAIN, read_segment
from .job import PARTS, NeardupJob, finished, load_state, save_state, task_id

PAIR = np.dtype([("first", "<i8"), ("second", "<i8")])
"""Two documents, by their numbers in the corpus; the first is the smaller one."""


@dataclass(frozen=True)
class PairTask:
    """Segments of a band: [first, last)."""

    band: int
    first: int
    last: int
    id: str


@dataclass(frozen=True)
class PairWorker:
    """Writes the pairs of segments."""

    job: NeardupJob
    tasks: tuple[str, ...]
    """The tasks that wrote the bands, in the order of the corpus."""

    @cached_property
    def parts(self) -> list[dict[str, Any]]:
        return [part for task in self.tasks for part in finished(self.job, task)["parts"]]

    @cached_property
    def bases(self) -> Int64:
        """Number of the first document of each part, and of all documents."""
        return np.cumsum([0, *(part["documents"] for part in self.parts)])

    def __call__(self, task: PairTask) -> Iterator[int]:
        if load_state(self.job, task.id) is None:
            keys, documents = [], []
            for part, base in zip(self.parts, self.bases[:-1].tolist(), strict=True):
                for segment in range(task.first, task.last):
                    entries = read_segment(self.job, part, task.band, segment)
                    keys.append(entries["key"])
                    documents.append(entries["document"].astype(np.int64) + base)
            pairs = pairs_of(np.concatenate(keys), np.concatenate(documents))
            name = write_named(self.job.work, PARTS, "pairs", pairs.tobytes())
            save_state(self.job, task.id, {"pairs": name, "count": len(pairs)})
        yield 1

    def plan(self) -> list[PairTask]:
        """Return the tasks: neighbouring segments together, up to `pair_entries`."""
        counts = sum(
            (np.diff(np.array(part["edges"], np.int64), axis=1) for part in self.parts),
            np.zeros((self.job.lsh.bands, self.job.segments), np.int64),
        )
        tasks = []
        for band, sizes in enumerate(counts.tolist()):
            first = total = 0
            for segment, size in enumerate(sizes):
                if segment > first and total + size > self.job.sizes.pair_entries:
                    tasks.append((band, first, segment))
                    first, total = segment, 0
                total += size
            tasks.append((band, first, self.job.segments))
        return [PairTask(*each, task_id(self.job, self.tasks, each)) for each in tasks]

    def pairs(self, task: PairTask) -> Any:
        """Return the pairs that a finished task found."""
        name = finished(self.job, task.id)["pairs"]
        return np.frombuffer(read_named(self.job.work, name, hint=RUN_AGAIN), PAIR)


def pairs_of(keys: Any, documents: Int64) -> Any:
    """Return the pairs of the first document with a key and each other one, in their order."""
    order = np.lexsort((documents, keys))
    keys, documents = keys[order], documents[order]
    same = np.zeros(len(keys), bool)
    same[1:] = keys[1:] == keys[:-1]
    starts = np.flatnonzero(~same)
    firsts = np.repeat(documents[starts], np.diff(np.append(starts, len(keys))))
    pairs = np.zeros(int(same.sum()), PAIR)
    pairs["first"], pairs["second"] = firsts[same], documents[same]
    return np.unique(pairs)
