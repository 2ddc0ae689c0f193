"""Tokenization tasks: read slices of the corpus, write shards.

The id of a task is a hash of all that decides its result: slices, tokenizer and settings. A task
saves its state after every finished shard, so a killed task resumes after its last shard. Tasks
are deterministic and idempotent: any worker, in any order, any number of times, writes the same
bytes.

    read, by the rules of what stays → leave out duplicates → choose the split → rearrange for
    fill-in-the-middle → tokenize → shards
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...dataplane import tokenizers
from ...dataplane.arrays import Int64
from ...dataplane.datasets.manifest import Shard
from ...dataplane.shards.documents import ShardDocuments
from ...dataplane.storage.verified import read_named
from ...dataplane.tokenizers import Encoded, TextError, Tokenizer, marks
from ..corpus.documents import DocumentReader, SpecialNames
from ..corpus.read_stats import BAD, MAX_MESSAGES, ReadStats
from ..corpus.screen import Screen, documents_read
from ..sources.format import BadRecord, Slice, Texts
from .buckets import write_bucketed_spill
from .fim import Rearrangement
from .settings import BuildJob, dataset_url, work_url
from .shuffle import write_spill
from .task_state import TaskEvent, TaskState
from .writing import split_long, write_shard

RUN_AGAIN = "run the same command again: every build writes this file again"


@dataclass(frozen=True)
class Task:
    """Slices that one worker tokenizes."""

    slices: tuple[Slice, ...]
    id: str
    drops: str | None = None
    """File in the work folder with the numbers of the documents to leave out."""

    @staticmethod
    def of(slices: Sequence[Slice], job: BuildJob, drops: str | None = None) -> Task:
        parts = [part.identity for part in slices]
        buckets = [] if job.buckets is None else [job.buckets]
        text = json.dumps([parts, drops, job.identity(), *buckets], sort_keys=True)
        return Task(tuple(slices), hashlib.sha256(text.encode()).hexdigest()[:32], drops)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.slices)

    @property
    def files(self) -> int:
        """Return the number of files whose first slice is in this task."""
        return sum(part.start == 0 for part in self.slices)


@dataclass(frozen=True)
class TokenizeWorker:
    """Runs tasks of a build. Each worker process has one, and loads its tokenizer once."""

    job: BuildJob

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizers.restore(
            self.job.tokenizer, self.job.tokenizer_files.__getitem__, self.job.url
        )

    @cached_property
    def rearrangement(self) -> Rearrangement | None:
        fim = self.job.fim
        return None if fim is None else Rearrangement(fim, self.tokenizer.special)

    @cached_property
    def reader(self) -> DocumentReader:
        screen = Screen(self.job.drops, self.job.filter, self.job.evaluations)
        return DocumentReader(self.job.source, self.job.skip_bad, screen if screen else None)

    def __call__(self, task: Task) -> Iterator[TaskEvent]:
        job = self.job
        state = TaskState.load(job.url, task.id, job.outputs)
        if state.done:
            yield TaskEvent(task.id, bytes=task.size, files=task.files, done=True)
            return
        stats = state.stats = ReadStats()  # a resumed task reads its slices again
        pending = {name: _PendingShard(job, name, task.id) for name in job.outputs}
        duplicates = self._duplicates(task)
        pieces = _PieceNumbers() if job.source.split_large or job.cuts else None
        names = SpecialNames(tuple(self.tokenizer.special))
        number = 0
        for file, texts in self.reader.read(task.slices, stats):
            tokens = 0
            names.note(file, texts, stats)
            piece = None if pieces is None else pieces.of(file, texts.positions)
            kept = [k for k in range(len(texts.texts)) if number + k not in duplicates]
            for name, chosen in self._choose(texts, kept, number, state).items():
                if not chosen:
                    continue
                documents, numbers = self._encode(file, texts, chosen, number, state)
                if piece is not None:
                    documents = replace(
                        documents, piece=piece[np.array(numbers, np.int64) - number]
                    )
                tokens += len(documents.tokens)
                for shard, last, split in pending[name].add(documents, numbers):
                    state.outputs[name].shards.append(shard)
                    state.outputs[name].next = last + 1
                    state.outputs[name].split += split
                    state.save(job.url, task.id)
            if self.rearrangement is not None:
                encoded = (k for k in kept if str(number + k) not in state.untokenizable)
                stats.counts += self.rearrangement.count(texts.texts[k] for k in encoded)
            number += len(texts.texts)
            yield TaskEvent(task.id, texts.size, len(texts.texts), tokens)
        for name, unwritten in pending.items():
            output = state.outputs[name]
            if unwritten.parts:
                shard, split = unwritten.write()
                output.shards.append(shard)
                output.split += split
            output.next = number
        stats.counts["documents read"] = documents_read(number, stats.counts)
        stats.counts["duplicates"] = len(duplicates)
        stats.counts["documents that were split"] = sum(o.split for o in state.outputs.values())
        stats.counts[f"{BAD}not tokenizable"] = len(state.untokenizable)
        stats.problems += list(state.untokenizable.values())[:MAX_MESSAGES]
        stats.counts = +stats.counts
        state.done = True
        state.save(job.url, task.id)
        yield TaskEvent(task.id, files=task.files, done=True)

    def encode(
        self, file: str, texts: Texts
    ) -> tuple[Encoded, list[int], list[tuple[int, BadRecord]]]:
        """Return the ids of the texts, the indices of the texts that have ids, and the others with
        their problems."""
        kept = list(range(len(texts.texts)))
        bad: list[tuple[int, BadRecord]] = []
        while True:
            try:
                encoded = self._ids(texts, kept)
                problems = self.tokenizer.misfits(encoded)
            except TextError as error:
                problems = {error.number: error.why}
            if not problems:
                return encoded, kept, bad
            for number, why in problems.items():
                k = kept[number]
                bad.append((k, BadRecord("not tokenizable", why, file, texts.positions[k])))
                self.reader.reject(bad[-1][1])
            kept = [k for number, k in enumerate(kept) if number not in problems]

    def _ids(self, texts: Texts, chosen: Sequence[int]) -> Encoded:
        if len(chosen) < len(texts.texts):
            texts = texts.select(chosen)
        if texts.marks is not None:
            return marks.encode(self.tokenizer, texts.texts, texts.marks)
        if self.rearrangement is not None:
            return marks.encode(self.tokenizer, *self.rearrangement.of(texts.texts))
        return self.tokenizer.encode(texts.texts)

    def _duplicates(self, task: Task) -> set[int]:
        """Return the numbers of the task's documents that are duplicates."""
        if task.drops is None:
            return set()
        data = read_named(work_url(self.job.url), task.drops, hint=RUN_AGAIN)
        return set(np.frombuffer(data, np.int64).tolist())

    def _choose(
        self, texts: Texts, kept: list[int], number: int, state: TaskState
    ) -> dict[str, list[int]]:
        """Return the indices of the kept documents that each dataset has and that are not in
        finished shards."""
        chosen: dict[str, list[int]] = {name: [] for name in self.job.outputs}
        if not self.job.splits:
            chosen[""] = kept
        else:
            for k in kept:
                chosen[choose_split(content_hash(texts.texts[k]), self.job.splits)].append(k)
        for name, picked in chosen.items():
            done = state.outputs[name].next - number
            if done > 0:
                chosen[name] = [k for k in picked if k >= done]
        return chosen

    def _encode(
        self, file: str, texts: Texts, chosen: list[int], first: int, state: TaskState
    ) -> tuple[ShardDocuments, list[int]]:
        """Return the chosen texts as ids, and their numbers in the task. A text that cannot be
        tokenized is a bad record."""
        if len(chosen) < len(texts.texts):
            texts = texts.select(chosen)
        numbers = [first + k for k in chosen]
        encoded, kept, bad = self.encode(file, texts)
        for k, problem in bad:
            state.untokenizable[str(numbers[k])] = str(problem)
        if bad:
            texts, numbers = texts.select(kept), [numbers[k] for k in kept]
        documents = ShardDocuments(
            tokens=encoded.tokens,
            starts=encoded.starts,
            files=(file,),
            file=np.zeros(len(texts.texts), np.int32),
            position=np.array(texts.positions, np.int64),
            ids=None if texts.ids is None else tuple(texts.ids),
            weights=encoded.weights,
            fields=texts.fields,
        )
        return documents, numbers


class _PieceNumbers:
    """Numbers the pieces of a document that was cut, or is too large to be read at once. They are
    consecutive and have the same position."""

    def __init__(self) -> None:
        self.last: tuple[str, int] | None = None
        self.count = 0

    def of(self, file: str, positions: Sequence[int]) -> Int64:
        """Return the piece number of each document, shifted left by 32 bits: `split_long` counts in
        the lower half."""
        pieces = np.zeros(len(positions), np.int64)
        for k, position in enumerate(positions):
            self.count = self.count + 1 if (file, position) == self.last else 0
            self.last = (file, position)
            pieces[k] = self.count
        return pieces << 32


class _PendingShard:
    """Documents of one dataset that do not fill a shard yet."""

    def __init__(self, job: BuildJob, output: str, task: str) -> None:
        self.job = job
        self.url = dataset_url(job.url, output)
        self.task = task
        self.parts: list[ShardDocuments] = []
        self.size = 0

    def add(
        self, documents: ShardDocuments, numbers: list[int]
    ) -> Iterator[tuple[Shard, int, int]]:
        """Add documents; yield each full shard, the number of its last document, and the number of
        its documents that were split."""
        if not len(documents):
            return
        ends = documents.starts[1:] * (documents.size / len(documents.tokens))
        done = 0
        while True:
            base = 0.0 if done == 0 else float(ends[done - 1])
            last = int(np.searchsorted(ends, base + self.job.spill_size - self.size))
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
        """Write a shard; return it and the number of its documents that were split."""
        documents = ShardDocuments.concatenate(self.parts)
        self.parts, self.size = [], 0
        split = 0
        if limit := self.job.max_document_tokens:
            split = int(np.count_nonzero(np.diff(documents.starts) > limit))
            documents = split_long(documents, limit)
        return self._write(documents), split

    def _write(self, documents: ShardDocuments) -> Shard:
        if self.job.seed is None:
            return write_shard(self.url, documents, self.job, self.task)
        write = write_spill if self.job.buckets is None else write_bucketed_spill
        return write(self.url, documents, self.job, self.task)


def content_hash(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def choose_split(digest: int, splits: Sequence[tuple[str, float]]) -> str:
    """Return the split of a document; it depends on the text alone, not on other files."""
    place = digest / 2**64
    for name, fraction in splits:
        if place < fraction:
            return name
        place -= fraction
    return "train"
