"""Tokenization tasks: read slices of the corpus, write shards.

A task's id is a hash of everything that decides the result: slices, tokenizer and settings. A task
saves its state after every finished shard, so a killed task resumes after the last one. Tasks are
deterministic and idempotent: any worker, in any order, any number of times, writes the same bytes.

    read, except dropped documents → leave out duplicates → choose the split → rearrange for
    fill-in-the-middle → tokenize → shards
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...console.machine import keep_freed_memory
from ...dataplane import tokenizers
from ...dataplane.arrays import Int64
from ...dataplane.datasets.manifest import Shard
from ...dataplane.shards.documents import ShardDocuments
from ...dataplane.storage.verified import read_named
from ...dataplane.tokenizers import Encoded, TextError, Tokenizer, marks
from ..corpus.documents import DocumentReader, SpecialNameCounter
from ..corpus.read_stats import BAD, MAX_MESSAGES, ReadStats
from ..corpus.screen import Screen, count_documents_read
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
    """File in the work folder with document numbers to leave out."""

    @staticmethod
    def make(slices: Sequence[Slice], job: BuildJob, drops: str | None = None) -> Task:
        slice_identities = [file_slice.identity for file_slice in slices]
        buckets = [] if job.buckets is None else [job.buckets]
        text = json.dumps([slice_identities, drops, job.identity(), *buckets], sort_keys=True)
        return Task(tuple(slices), hashlib.sha256(text.encode()).hexdigest()[:32], drops)

    @property
    def size(self) -> int:
        return sum(file_slice.size for file_slice in self.slices)

    @property
    def files(self) -> int:
        """Return how many files have their first slice in this task."""
        return sum(file_slice.start == 0 for file_slice in self.slices)


@dataclass(frozen=True)
class TokenizeWorker:
    """Runs a build's tasks. A worker process has one, and loads the tokenizer once."""

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
        return DocumentReader(
            self.job.source, self.job.skip_bad, screen if screen else None, self.job.genome
        )

    def __call__(self, task: Task) -> Iterator[TaskEvent]:
        keep_freed_memory()
        job = self.job
        state = TaskState.load(job.url, task.id, job.outputs)
        if state.done:
            yield TaskEvent(task.id, bytes=task.size, files=task.files, done=True)
            return
        stats = state.stats = ReadStats()  # a resumed task reads its slices again
        pending = {name: _PendingShard(job, name, task.id) for name in job.outputs}
        duplicates = self._duplicates(task)
        numbering = _PieceNumbers() if job.source.split_large or job.cuts else None
        name_counter = SpecialNameCounter(tuple(self.tokenizer.special))
        number = 0
        for file, texts in self.reader.read(task.slices, stats):
            tokens = 0
            name_counter.note(file, texts, stats)
            piece_numbers = None if numbering is None else numbering.number(file, texts.positions)
            kept = [k for k in range(len(texts.texts)) if number + k not in duplicates]
            for name, indices in self._assign_outputs(texts, kept, number, state).items():
                if not indices:
                    continue
                documents, numbers = self._encode(file, texts, indices, number, state)
                if piece_numbers is not None:
                    documents = replace(
                        documents, piece=piece_numbers[np.array(numbers, np.int64) - number]
                    )
                tokens += len(documents.tokens)
                for shard, last_number, split in pending[name].add(documents, numbers):
                    state.outputs[name].shards.append(shard)
                    state.outputs[name].next = last_number + 1
                    state.outputs[name].split += split
                    state.save(job.url, task.id)
            if self.rearrangement is not None:
                encoded = (k for k in kept if str(number + k) not in state.untokenizable)
                stats.counts += self.rearrangement.count(texts.texts[k] for k in encoded)
            number += len(texts.texts)
            yield TaskEvent(task.id, texts.size, len(texts.texts), tokens)
        for name, pending_shard in pending.items():
            output = state.outputs[name]
            if pending_shard.parts:
                shard, split = pending_shard.write()
                output.shards.append(shard)
                output.split += split
            output.next = number
        stats.counts["documents read"] = count_documents_read(number, stats.counts)
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
        """Encode texts; return ids, the indices of texts that have ids, and the other indices with
        their problems."""
        kept = list(range(len(texts.texts)))
        rejected: list[tuple[int, BadRecord]] = []
        while True:
            try:
                encoded = self._encode_texts(texts, kept)
                problems = self.tokenizer.find_misfits(encoded)
            except TextError as error:
                problems = {error.number: error.why}
            if not problems:
                return encoded, kept, rejected
            for number, reason in problems.items():
                k = kept[number]
                rejected.append((k, BadRecord("not tokenizable", reason, file, texts.positions[k])))
                self.reader.reject(rejected[-1][1])
            kept = [k for number, k in enumerate(kept) if number not in problems]

    def _encode_texts(self, texts: Texts, indices: Sequence[int]) -> Encoded:
        if len(indices) < len(texts.texts):
            texts = texts.select(indices)
        if texts.marks is not None:
            return marks.encode(self.tokenizer, texts.texts, texts.marks)
        if self.rearrangement is not None:
            return marks.encode(self.tokenizer, *self.rearrangement.rearrange(texts.texts))
        return self.tokenizer.encode(texts.texts)

    def _duplicates(self, task: Task) -> set[int]:
        """Read which of the task's documents are duplicates, by number."""
        if task.drops is None:
            return set()
        data = read_named(work_url(self.job.url), task.drops, hint=RUN_AGAIN)
        return set(np.frombuffer(data, np.int64).tolist())

    def _assign_outputs(
        self, texts: Texts, kept: list[int], number: int, state: TaskState
    ) -> dict[str, list[int]]:
        """Assign kept documents to datasets; return indices by output, except documents in finished
        shards."""
        indices_by_output: dict[str, list[int]] = {name: [] for name in self.job.outputs}
        if not self.job.splits:
            indices_by_output[""] = kept
        else:
            for k in kept:
                group = None if texts.groups is None else texts.groups[k]
                if group not in indices_by_output:
                    digest = content_hash(texts.texts[k] if group is None else group)
                    group = choose_split(digest, self.job.splits)
                indices_by_output[group].append(k)
        for name, indices in indices_by_output.items():
            num_finished = state.outputs[name].next - number
            if num_finished > 0:
                indices_by_output[name] = [k for k in indices if k >= num_finished]
        return indices_by_output

    def _encode(
        self, file: str, texts: Texts, indices: list[int], first: int, state: TaskState
    ) -> tuple[ShardDocuments, list[int]]:
        """Encode texts at these indices; return documents, and their numbers in the task. A text
        that cannot be tokenized is a bad record."""
        if len(indices) < len(texts.texts):
            texts = texts.select(indices)
        numbers = [first + k for k in indices]
        encoded, kept, rejected = self.encode(file, texts)
        for k, problem in rejected:
            state.untokenizable[str(numbers[k])] = str(problem)
        if rejected:
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
    """Numbers the pieces of documents that were cut, or are too large to be read at once. A
    document's pieces are consecutive and have the same position."""

    def __init__(self) -> None:
        self.last: tuple[str, int] | None = None
        self.count = 0

    def number(self, file: str, positions: Sequence[int]) -> Int64:
        """Return piece numbers, shifted left by 32 bits: `split_long` counts in the lower half."""
        pieces = np.zeros(len(positions), np.int64)
        for k, position in enumerate(positions):
            self.count = self.count + 1 if (file, position) == self.last else 0
            self.last = (file, position)
            pieces[k] = self.count
        return pieces << 32


class _PendingShard:
    """Documents for one dataset that do not fill a shard yet."""

    def __init__(self, job: BuildJob, output: str, task: str) -> None:
        self.job = job
        self.url = dataset_url(job.url, output)
        self.task = task
        self.parts: list[ShardDocuments] = []
        self.size = 0

    def add(
        self, documents: ShardDocuments, numbers: list[int]
    ) -> Iterator[tuple[Shard, int, int]]:
        """Add documents; yield full shards with the number of the last document, and the count of
        split documents."""
        if not len(documents):
            return
        ends = documents.starts[1:] * (documents.size / len(documents.tokens))
        num_written = 0
        while True:
            base = 0.0 if num_written == 0 else float(ends[num_written - 1])
            last = int(np.searchsorted(ends, base + self.job.spill_size - self.size))
            if last >= len(documents):
                break
            self.parts.append(documents[num_written : last + 1])
            shard, split = self.write()
            yield shard, numbers[last], split
            num_written = last + 1
        remaining = documents[num_written:]
        if len(remaining):
            self.parts.append(remaining)
            self.size += remaining.size

    def write(self) -> tuple[Shard, int]:
        """Write a shard; return it and how many documents were split."""
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
    """Hash a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def choose_split(digest: int, splits: Sequence[tuple[str, float]]) -> str:
    """Choose a document's split; it depends on the text alone, not on other files."""
    draw = digest / 2**64
    for name, fraction in splits:
        if draw < fraction:
            return name
        draw -= fraction
    return "train"
