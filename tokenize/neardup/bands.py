"""Band tasks, which come first: read documents, write their band keys and places.

A task's part holds up to `part_documents` documents. Its band file has a segment per band and key
range; a segment has a digest, so that it can be read alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...console.errors import IntegrityError
from ...dataplane.storage import storage
from ...dataplane.storage.verified import read_checked, read_named, write_named
from ..corpus.documents import DocumentReader
from ..corpus.read_stats import ReadStats
from ..sources.format import Slice
from .job import PARTS, NeardupJob, load_state, save_state, task_id
from .signatures import compute_band_keys

BATCH = 1 << 20
"""Characters whose signatures are computed at once; a longer document is a batch by itself."""
DIGEST_BYTES = 16

ENTRY = np.dtype([("key", "<u8"), ("document", "<u4")])
"""A band key; `document` counts within the part."""
PLACE = np.dtype([("file", "<u4"), ("record", "<i8")])
"""A document's place: `file` counts within the task, `record` within the file."""

RUN_AGAIN = "remove the folder `work` beside it and run the same command again"


@dataclass(frozen=True)
class BandTask:
    """Slices that one worker reads."""

    slices: tuple[Slice, ...]
    id: str

    @staticmethod
    def make(slices: Sequence[Slice], job: NeardupJob) -> BandTask:
        return BandTask(tuple(slices), task_id(job, [file_slice.identity for file_slice in slices]))

    @property
    def size(self) -> int:
        return sum(file_slice.size for file_slice in self.slices)

    @cached_property
    def files(self) -> list[str]:
        """The slices' file names."""
        return list(dict.fromkeys(file_slice.file.name for file_slice in self.slices))


@dataclass(frozen=True)
class BandEvent:
    """A task's progress since its last event."""

    bytes: int = 0
    documents: int = 0


@dataclass(frozen=True)
class BandWorker:
    """Writes a task's bands."""

    job: NeardupJob

    def __call__(self, task: BandTask) -> Iterator[BandEvent]:
        job = self.job
        if (state := load_state(job, task.id)) is not None:
            yield BandEvent(task.size, sum(part["documents"] for part in state["parts"]))
            return
        stats = ReadStats()
        parts = []
        writer = _PartWriter(job)
        file_numbers = {name: number for number, name in enumerate(task.files)}
        for name, texts in DocumentReader(job.source, job.skip_bad).read(task.slices, stats):
            for first, end in batches(texts.texts):
                writer.add(texts.texts[first:end], file_numbers[name], texts.positions[first:end])
                if writer.documents >= job.sizes.part_documents:
                    parts.append(writer.write())
                    writer = _PartWriter(job)
            yield BandEvent(texts.size, len(texts.texts))
        if writer.documents:
            parts.append(writer.write())
        counts = dict(sorted((+stats.counts).items()))
        save_state(job, task.id, {"parts": parts, "counts": counts, "problems": stats.problems})


def batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) of texts with about BATCH characters."""
    first, size = 0, 0
    for number, text in enumerate(texts, start=1):
        size += len(text)
        if size >= BATCH or number == len(texts):
            yield first, number
            first, size = number, 0


class _PartWriter:
    def __init__(self, job: NeardupJob) -> None:
        self.job = job
        self.keys: list[Any] = []
        self.places: list[Any] = []
        self.documents = 0

    def add(self, texts: Sequence[str], file: int, positions: Sequence[int]) -> None:
        self.keys.append(compute_band_keys(texts, self.job.lsh))
        places = np.zeros(len(texts), PLACE)
        places["file"], places["record"] = file, positions
        self.places.append(places)
        self.documents += len(texts)

    def write(self) -> dict[str, Any]:
        """Write the part; return its entry for the task's state."""
        job = self.job
        keys = np.concatenate(self.keys, axis=1)
        boundaries = [k * (2**64 // job.segments) for k in range(1, job.segments)]
        blocks: list[bytes] = []
        band_edges: list[list[int]] = []
        digests: list[str] = []
        for band in keys:
            order = np.argsort(band, kind="stable")
            entries = np.zeros(len(order), ENTRY)
            entries["key"], entries["document"] = band[order], order
            inner_cuts = np.searchsorted(entries["key"], np.array(boundaries, np.uint64))
            cuts = [0, *inner_cuts.tolist(), len(order)]
            band_edges.append(cuts)
            for low, high in itertools.pairwise(cuts):
                blocks.append(entries[low:high].tobytes())
                digests.append(_digest(blocks[-1]))
        return {
            "documents": self.documents,
            "bands": write_named(job.work, PARTS, "bands", b"".join(blocks)),
            "edges": band_edges,
            "digests": digests,
            "places": write_named(job.work, PARTS, "places", np.concatenate(self.places).tobytes()),
        }


def read_segment(job: NeardupJob, part: dict[str, Any], band: int, segment: int) -> Any:
    """Read a segment: a band's entries with keys in one range."""
    url = storage.join(job.work, part["bands"])
    low, high = part["edges"][band][segment : segment + 2]
    if low == high:
        return np.zeros(0, ENTRY)

    def check(data: bytes) -> bytes:
        if _digest(data) != part["digests"][band * job.segments + segment]:
            raise IntegrityError(
                f"{url} is damaged: the bytes of band {band} do not match their hash",
                hint=RUN_AGAIN,
            )
        return data

    first = (band * part["documents"] + low) * ENTRY.itemsize
    data = read_checked(url, check, first, first + (high - low) * ENTRY.itemsize)
    return np.frombuffer(data, ENTRY)


def read_places(job: NeardupJob, part: dict[str, Any]) -> Any:
    """Read where a part's documents come from."""
    return np.frombuffer(read_named(job.work, part["places"], hint=RUN_AGAIN), PLACE)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[: 2 * DIGEST_BYTES]
