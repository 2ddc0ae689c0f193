"""Pair tasks, which come second: find documents that agree in a band.

A task compares all documents' keys in one band and one key range. Documents with equal keys are
paired with the first of them, which is enough to find their cluster.
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
from .job import PARTS, NeardupJob, finished_state, load_state, save_state, task_id

PAIR = np.dtype([("first", "<i8"), ("second", "<i8")])
"""Two documents, by number in the corpus; `first` < `second`."""


@dataclass(frozen=True)
class PairTask:
    """A band's segments [first, end)."""

    band: int
    first: int
    end: int
    id: str


@dataclass(frozen=True)
class PairWorker:
    """Finds pairs in segments, and writes them."""

    job: NeardupJob
    tasks: tuple[str, ...]
    """Band-task ids, in corpus order."""

    @cached_property
    def parts(self) -> list[dict[str, Any]]:
        return [part for task in self.tasks for part in finished_state(self.job, task)["parts"]]

    @cached_property
    def bases(self) -> Int64:
        """First document numbers by part, then the document count: [parts + 1]."""
        return np.cumsum([0, *(part["documents"] for part in self.parts)])

    def __call__(self, task: PairTask) -> Iterator[int]:
        if load_state(self.job, task.id) is None:
            keys, documents = [], []
            for part, base in zip(self.parts, self.bases[:-1].tolist(), strict=True):
                for segment in range(task.first, task.end):
                    entries = read_segment(self.job, part, task.band, segment)
                    keys.append(entries["key"])
                    documents.append(entries["document"].astype(np.int64) + base)
            pairs = find_pairs(np.concatenate(keys), np.concatenate(documents))
            name = write_named(self.job.work, PARTS, "pairs", pairs.tobytes())
            save_state(self.job, task.id, {"pairs": name, "count": len(pairs)})
        yield 1

    def plan(self) -> list[PairTask]:
        """Plan the tasks: neighbouring segments together, up to `pair_entries`."""
        segment_sizes = sum(
            (np.diff(np.array(part["edges"], np.int64), axis=1) for part in self.parts),
            np.zeros((self.job.lsh.bands, self.job.segments), np.int64),
        )
        tasks = []
        for band, sizes in enumerate(segment_sizes.tolist()):
            first = num_entries = 0
            for segment, size in enumerate(sizes):
                if segment > first and num_entries + size > self.job.sizes.pair_entries:
                    tasks.append((band, first, segment))
                    first, num_entries = segment, 0
                num_entries += size
            tasks.append((band, first, self.job.segments))
        return [PairTask(*segments, task_id(self.job, self.tasks, segments)) for segments in tasks]

    def pairs(self, task: PairTask) -> Any:
        """Read the pairs that a finished task wrote."""
        name = finished_state(self.job, task.id)["pairs"]
        return np.frombuffer(read_named(self.job.work, name, hint=RUN_AGAIN), PAIR)


def find_pairs(keys: Any, documents: Int64) -> Any:
    """Pair documents that have equal keys with the first of them; return sorted pairs."""
    order = np.lexsort((documents, keys))
    keys, documents = keys[order], documents[order]
    is_repeated = np.zeros(len(keys), bool)
    is_repeated[1:] = keys[1:] == keys[:-1]
    starts = np.flatnonzero(~is_repeated)
    firsts = np.repeat(documents[starts], np.diff(np.append(starts, len(keys))))
    pairs = np.zeros(int(is_repeated.sum()), PAIR)
    pairs["first"], pairs["second"] = firsts[is_repeated], documents[is_repeated]
    return np.unique(pairs)
