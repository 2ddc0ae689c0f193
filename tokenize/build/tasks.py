"""One task of a build: slices of the corpus in, finished shards out.

A task is named by what decides its result, and notes every shard that it has finished, so that a
task that was killed goes on after its last shard. Its result depends on nothing but its own input:
any worker, in any order, any number of times, writes the same bytes.

    read → leave out duplicates → choose the split → tokenize → shards
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from ...dataplane import tokenizers
from ...dataplane.arrays import Int64
from ...dataplane.datasets.manifest import Shard
from ...dataplane.shards.documents import ShardDocuments
from ...dataplane.storage import storage
from ...dataplane.tokenizers import Encoded, TextError, Tokenizer
from ..corpus.documents import NAMED_PROBLEMS, Reader, SpecialNames, select
from ..sources import BadRecord, Slice, Texts
from .settings import BuildJob, dataset_url, work_url
from .shuffle import write_spill
from .task_state import Event, Record
from .writing import split_long, write_shard


@dataclass(frozen=True)
class Task:
    slices: tuple[Slice, ...]
    id: str
    drops: str | None = None
    """The file that holds the numbers of the documents to leave out."""

    @staticmethod
    def of(slices: Sequence[Slice], job: BuildJob, drops: str | None = None) -> Task:
        parts = [asdict(part) for part in slices]
        text = json.dumps([parts, drops, job.identity()], sort_keys=True)
        return Task(tuple(slices), hashlib.sha256(text.encode()).hexdigest()[:32], drops)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.slices)

    @property
    def files(self) -> int:
        """How many files begin in this task."""
        return sum(part.start == 0 for part in self.slices)


@dataclass(frozen=True)
class BuildTask:
    """Runs the tasks of a job; a worker has one of these, and builds its tokenizer once."""

    job: BuildJob

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizers.restore(
            self.job.tokenizer, self.job.tokenizer_files.__getitem__, self.job.url
        )

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.job.source, self.job.skip_bad)

    def __call__(self, task: Task) -> Iterator[Event]:
        job = self.job
        record = Record.load(job.url, task.id, job.outputs)
        if record.done:
            yield Event(task.id, bytes=task.size, files=task.files, done=True)
            return
        record.counts, record.problems, record.notes = Counter(), [], []
        pending = {name: _Pending(job, name, task.id) for name in job.outputs}
        fallen = self._fallen(task)
        pieces = _Pieces()
        names = SpecialNames(self.tokenizer.special)
        number = 0
        for file, texts in self.reader.read(task.slices, record):
            tokens = 0
            names.note(file, texts, record)
            piece = pieces.of(file, texts.positions) if job.source.split_large else None
            for name, chosen in self._choose(texts, number, fallen, record).items():
                if not chosen:
                    continue
                documents, numbers = self._encode(file, texts, chosen, number, record)
                if piece is not None:
                    documents = replace(
                        documents, piece=piece[np.array(numbers, np.int64) - number]
                    )
                tokens += len(documents.tokens)
                for shard, last, split in pending[name].add(documents, numbers):
                    record.outputs[name].shards.append(shard)
                    record.outputs[name].next = last + 1
                    record.outputs[name].split += split
                    record.save(job.url, task.id)
            number += len(texts.texts)
            yield Event(task.id, texts.size, len(texts.texts), tokens)
        for name, waiting in pending.items():
            output = record.outputs[name]
            if waiting.parts:
                shard, split = waiting.write()
                output.shards.append(shard)
                output.split += split
            output.next = number
        record.counts["documents read"] = number
        record.counts["duplicates"] = len(fallen)
        record.counts["documents that were split"] = sum(o.split for o in record.outputs.values())
        record.counts["bad: not tokenizable"] = len(record.untokenizable)
        record.problems += list(record.untokenizable.values())[:NAMED_PROBLEMS]
        record.counts = +record.counts
        record.done = True
        record.save(job.url, task.id)
        yield Event(task.id, files=task.files, done=True)

    def encode(
        self, file: str, texts: Texts
    ) -> tuple[Encoded, list[int], list[tuple[int, BadRecord]]]:
        """The ids of texts, which of them have any, and what is wrong with the others."""
        kept, chosen = list(range(len(texts.texts))), texts.texts
        bad: list[tuple[int, BadRecord]] = []
        while True:
            try:
                return self.tokenizer.encode(chosen), kept, bad
            except TextError as error:
                k = kept.pop(error.number)
                bad.append((k, BadRecord("not tokenizable", error.why, file, texts.positions[k])))
                self.reader.refuse(bad[-1][1])
                chosen = [texts.texts[k] for k in kept]

    def _fallen(self, task: Task) -> set[int]:
        """The numbers of the task's documents that are duplicates of others."""
        if task.drops is None:
            return set()
        data = storage.read(work_url(self.job.url, task.drops))
        return set(np.frombuffer(data, np.int64).tolist())

    def _choose(
        self, texts: Texts, number: int, fallen: set[int], record: Record
    ) -> dict[str, list[int]]:
        """Which documents each dataset gets, without those that lie in its finished shards."""
        chosen: dict[str, list[int]] = {name: [] for name in self.job.outputs}
        kept = list(range(len(texts.texts)))
        if fallen:
            kept = [k for k in kept if number + k not in fallen]
        if not self.job.splits:
            chosen[""] = kept
        else:
            for k in kept:
                chosen[choose_split(content_hash(texts.texts[k]), self.job.splits)].append(k)
        for name, picked in chosen.items():
            done = record.outputs[name].next - number
            if done > 0:
                chosen[name] = [k for k in picked if k >= done]
        return chosen

    def _encode(
        self, file: str, texts: Texts, chosen: list[int], first: int, record: Record
    ) -> tuple[ShardDocuments, list[int]]:
        """The chosen texts as ids, and their numbers in the task. A text that has no ids is bad."""
        if len(chosen) < len(texts.texts):
            texts = select(texts, chosen)
        numbers = [first + k for k in chosen]
        encoded, kept, bad = self.encode(file, texts)
        for k, problem in bad:
            record.untokenizable[str(numbers[k])] = str(problem)
        if bad:
            texts, numbers = select(texts, kept), [numbers[k] for k in kept]
        documents = ShardDocuments(
            tokens=encoded.tokens,
            starts=encoded.starts,
            files=(file,),
            file=np.zeros(len(texts.texts), np.int32),
            position=np.array(texts.positions, np.int64),
            ids=None if texts.ids is None else tuple(texts.ids),
            weights=encoded.weights,
        )
        return documents, numbers


class _Pieces:
    """Numbers the pieces in which a source gives what is too large to be read at once. They follow
    each other, with one position."""

    def __init__(self) -> None:
        self.last: tuple[str, int] | None = None
        self.count = 0

    def of(self, file: str, positions: Sequence[int]) -> Int64:
        """For each document its piece; the lower half counts what `split_long` makes of it."""
        pieces = np.zeros(len(positions), np.int64)
        for k, position in enumerate(positions):
            self.count = self.count + 1 if (file, position) == self.last else 0
            self.last = (file, position)
            pieces[k] = self.count
        return pieces << 32


class _Pending:
    """The documents of one dataset that wait until they fill a shard."""

    def __init__(self, job: BuildJob, output: str, task: str) -> None:
        self.job = job
        self.url = dataset_url(job.url, output)
        self.task = task
        self.parts: list[ShardDocuments] = []
        self.size = 0

    def add(
        self, documents: ShardDocuments, numbers: list[int]
    ) -> Iterator[tuple[Shard, int, int]]:
        """Take documents; give back each shard that is full, the number of its last document, and
        how many of its documents were split."""
        if not len(documents):
            return
        ends = documents.starts[1:] * (documents.size / len(documents.tokens))
        done = 0
        while True:
            base = 0.0 if done == 0 else float(ends[done - 1])
            last = int(np.searchsorted(ends, base + self.job.shard_size - self.size))
            if last >= len(documents):
                break
            self.parts.append(documents[done : last + 1])
            shard, split = self.write()
            yield shard, numbers[last], split
            done = last + 1
        rest = documents[done:]
        if len(rest):
            self.parts.append(rest)
            self.size += rest.size

    def write(self) -> tuple[Shard, int]:
        """Make a shard of what waits; how many of its documents were split."""
        documents = ShardDocuments.concatenate(self.parts)
        self.parts, self.size = [], 0
        split = 0
        if limit := self.job.max_document_tokens:
            split = int(np.count_nonzero(np.diff(documents.starts) > limit))
            documents = split_long(documents, limit)
        write = write_shard if self.job.seed is None else write_spill
        return write(self.url, documents, self.job, self.task), split


def content_hash(text: str) -> int:
    """64 bits of what a document says."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def choose_split(digest: int, splits: Sequence[tuple[str, float]]) -> str:
    """The split of a document: decided by what it says alone, so that no other file matters."""
    place = digest / 2**64
    for name, share in splits:
        if place < share:
            return name
        place -= share
    return "train"
