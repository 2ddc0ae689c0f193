"""One task of a build: slices of the corpus in, finished shards out.

A task is named by what decides its result, and notes every shard that it has finished, so that a
task that was killed goes on after its last shard. Its result depends on nothing but its own input:
any worker, in any order, any number of times, writes the same bytes.

    read → leave out duplicates → choose the split → tokenize → shards
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..console.errors import InputError
from ..dataplane import manifest, storage
from ..dataplane.manifest import Shard, TokenizerInfo
from ..dataplane.shards import Documents, shard_format
from ..dataplane.shards.mds import index_columns
from ..dataplane.tokenizers import Tokenizer
from .sources import Problem, Slice, SourceConfig, Texts, source

VERSION = 1
"""Changes when the same input would give other bytes: older tasks are not reused then."""
WORK = "work"
NAMED_PROBLEMS = 100
"""How many bad records a task names; it counts all of them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all tasks of a build share."""

    url: str
    format: str
    compression: str | None
    shard_size: int
    source: SourceConfig
    tokenizer: TokenizerInfo
    tokenizer_url: str
    """Where the tokenizer's own files lie."""
    splits: tuple[tuple[str, float], ...] = ()
    max_document_tokens: int | None = None
    skip_bad: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the datasets that are built: one without a name, or the splits."""
        return ("train", *(name for name, _ in self.splits)) if self.splits else ("",)

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of a task, besides its input."""
        settings = asdict(self)
        for key in ("url", "tokenizer", "tokenizer_url"):
            del settings[key]
        tokenizer = [self.tokenizer.kind, self.tokenizer.fingerprint, self.tokenizer.spec]
        return {**settings, "tokenizer": tokenizer, "version": VERSION}


@dataclass(frozen=True)
class Task:
    slices: tuple[Slice, ...]
    id: str

    @staticmethod
    def of(slices: Sequence[Slice], job: Job) -> Task:
        parts = [asdict(part) for part in slices]
        text = json.dumps([parts, job.identity()], sort_keys=True)
        return Task(tuple(slices), hashlib.sha256(text.encode()).hexdigest()[:32])

    @property
    def size(self) -> int:
        return sum(part.size for part in self.slices)


@dataclass
class Output:
    """What a task has finished of one dataset."""

    shards: list[Shard] = field(default_factory=list)
    next: int = 0
    """How many of the task's documents lie in finished shards, or are of no concern to them."""


@dataclass
class Record:
    """What is noted of a task in work/tasks: the shards it has finished, what it counted."""

    outputs: dict[str, Output]
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    done: bool = False

    def save(self, url: str, task: str) -> None:
        outputs = {name: asdict(output) for name, output in self.outputs.items()}
        for output in outputs.values():
            for shard in output["shards"]:
                shard["chunks"] = base64.b64encode(shard["chunks"]).decode()
        data = {**vars(self), "outputs": outputs}
        storage.write(record_url(url, task), json.dumps(data).encode())

    @staticmethod
    def load(url: str, task: str, outputs: Sequence[str]) -> Record:
        where = record_url(url, task)
        if not storage.exists(where):
            return Record({name: Output() for name in outputs})
        data = json.loads(storage.read(where))
        found = {}
        for name, output in data["outputs"].items():
            shards = [
                Shard(**{**shard, "chunks": base64.b64decode(shard["chunks"])})
                for shard in output["shards"]
            ]
            found[name] = Output(shards, output["next"])
        return Record(found, Counter(data["counts"]), data["problems"], data["done"])


@dataclass(frozen=True)
class Event:
    """What a running task tells: what it has read and written since its last word."""

    task: str
    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    done: bool = False


def record_url(url: str, task: str) -> str:
    return storage.join(url, WORK, "tasks", f"{task}.json")


def dataset_url(url: str, output: str) -> str:
    return storage.join(url, output) if output else url


@dataclass(frozen=True)
class BuildTask:
    """Runs the tasks of a job; a worker has one of these, and builds its tokenizer once."""

    job: Job

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from ..dataplane import tokenizers

        return tokenizers.load(self.job.tokenizer, self.job.tokenizer_url)

    def __call__(self, task: Task) -> Iterator[Event]:
        job = self.job
        record = Record.load(job.url, task.id, job.outputs)
        if record.done:
            yield Event(task.id, bytes=task.size, done=True)
            return
        record.counts, record.problems = Counter(), []
        pending = {name: _Pending(job, name, task.id) for name in job.outputs}
        number = 0
        for name_of_file, texts in self._texts(task, record):
            tokens = 0
            for name, chosen in self._choose(texts, number, record).items():
                if not chosen:
                    continue
                documents = self._encode(name_of_file, texts, chosen)
                tokens += len(documents.tokens)
                for shard, last in pending[name].add(documents, [number + k for k in chosen]):
                    record.outputs[name].shards.append(shard)
                    record.outputs[name].next = last + 1
                    record.save(job.url, task.id)
            number += len(texts.texts)
            yield Event(task.id, texts.size, len(texts.texts), tokens)
        for name, waiting in pending.items():
            record.outputs[name].shards += waiting.finish()
            record.outputs[name].next = number
        record.done = True
        record.save(job.url, task.id)
        yield Event(task.id, done=True)

    def _texts(self, task: Task, record: Record) -> Iterator[tuple[str, Texts]]:
        """Each file's documents, without those that are bad or empty."""
        for part in task.slices:
            found = 0
            for texts in source(part.file.format).read(part, self.job.source):
                for problem in texts.problems:
                    self._bad(problem, record)
                empty = texts.texts.count("")
                if empty:
                    record.counts["empty documents"] += empty
                    kept = [k for k, text in enumerate(texts.texts) if text]
                    texts = _select(texts, kept)
                found += len(texts.texts) + len(texts.problems)
                record.counts["documents"] += len(texts.texts)
                yield part.file.name, texts
            if not found and part.start == 0:
                record.counts["files without documents"] += 1

    def _bad(self, problem: Problem, record: Record) -> None:
        if not self.job.skip_bad:
            raise InputError(
                f"{problem.kind}: {problem.what}",
                where=problem.where(),
                mend="mend the file, or leave such records out with --on-error skip",
            )
        record.counts[f"bad: {problem.kind}"] += 1
        if len(record.problems) < NAMED_PROBLEMS:
            record.problems.append(f"{problem.where()}: {problem.kind}: {problem.what}")

    def _choose(self, texts: Texts, number: int, record: Record) -> dict[str, list[int]]:
        """Which documents each dataset gets, without those that lie in its finished shards."""
        count = len(texts.texts)
        if not self.job.splits:
            chosen = {"": list(range(count))}
        else:
            chosen = {name: [] for name in self.job.outputs}
            for k, text in enumerate(texts.texts):
                chosen[choose_split(content_hash(text), self.job.splits)].append(k)
        for name, picked in chosen.items():
            done = record.outputs[name].next - number
            if done > 0:
                chosen[name] = [k for k in picked if k >= done]
        return chosen

    def _encode(self, file: str, texts: Texts, chosen: list[int]) -> Documents:
        if len(chosen) < len(texts.texts):
            texts = _select(texts, chosen)
        encoded = self.tokenizer.encode(texts.texts)
        return Documents(
            tokens=encoded.tokens,
            starts=encoded.starts,
            files=(file,),
            file=np.zeros(len(texts.texts), np.int32),
            position=np.array(texts.positions, np.int64),
            ids=None if texts.ids is None else tuple(texts.ids),
            weights=encoded.weights,
        )


class _Pending:
    """The documents of one dataset that wait until they fill a shard."""

    def __init__(self, job: Job, output: str, task: str) -> None:
        self.job = job
        self.url = dataset_url(job.url, output)
        self.task = task
        self.parts: list[Documents] = []
        self.size = 0

    def add(self, documents: Documents, numbers: list[int]) -> Iterator[tuple[Shard, int]]:
        """Take documents; give back each shard that is full, and its last document's number."""
        ends = np.cumsum(np.diff(documents.starts)) * (documents.size / len(documents.tokens))
        done = 0
        while True:
            base = 0.0 if done == 0 else float(ends[done - 1])
            last = int(np.searchsorted(ends, base + self.job.shard_size - self.size))
            if last >= len(documents):
                break
            self.parts.append(documents[done : last + 1])
            yield self._write(), numbers[last]
            done = last + 1
        rest = documents[done:]
        if len(rest):
            self.parts.append(rest)
            self.size += rest.size

    def finish(self) -> list[Shard]:
        return [self._write()] if self.parts else []

    def _write(self) -> Shard:
        documents = Documents.concatenate(self.parts)
        self.parts, self.size = [], 0
        if self.job.max_document_tokens:
            documents = split_long(documents, self.job.max_document_tokens)
        return write_shard(self.url, documents, self.job, self.task)


def write_shard(url: str, documents: Documents, job: Job, task: str) -> Shard:
    """Write documents as one shard, named by its content."""
    buffer = io.BytesIO()
    shard_format(job.format).write(buffer, documents)
    hasher = manifest.ChunkHasher()
    hasher.update(buffer.getbuffer())
    chunks, digest = hasher.finish()
    name = f"shards/{digest[:32]}.{job.format}"
    shard = Shard(
        name=name,
        size=hasher.size,
        documents=len(documents),
        tokens=len(documents.tokens),
        hash=digest,
        chunks=chunks,
        task=task,
    )
    if not job.compression:
        storage.write(storage.join(url, name), buffer.getvalue())
        return shard
    import zstandard

    level = int(job.compression.partition(":")[2] or 3)
    stored = zstandard.ZstdCompressor(level=level).compress(buffer.getbuffer())
    storage.write(storage.join(url, f"{name}.zstd"), stored)
    return replace(
        shard,
        stored_name=f"{name}.zstd",
        stored_size=len(stored),
        stored_hash=hashlib.sha256(stored).hexdigest(),
    )


def split_long(documents: Documents, limit: int) -> Documents:
    """Documents of at most `limit` tokens: what is longer becomes several, each with its end."""
    lengths = np.diff(documents.starts)
    if not len(lengths) or lengths.max() <= limit:
        return documents
    end = documents.tokens[documents.starts[1] - 1]
    # The last token of a document is its end; the others are dealt out, limit - 1 at a time.
    pieces = np.maximum(1, -(-(lengths - 1) // (limit - 1)))
    owner = np.repeat(np.arange(len(documents)), pieces)
    order = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    body = np.minimum(limit - 1, (lengths - 1)[owner] - order * (limit - 1))
    starts = np.concatenate([[0], np.cumsum(body + 1)])
    is_end = np.zeros(starts[-1], bool)
    is_end[starts[1:] - 1] = True
    was_end = np.zeros(len(documents.tokens), bool)
    was_end[documents.starts[1:] - 1] = True
    tokens: Any = np.full(int(starts[-1]), end, documents.tokens.dtype)
    tokens[~is_end] = documents.tokens[~was_end]
    weights = None
    if documents.weights is not None:
        weights = np.zeros(starts[-1], np.uint8)
        weights[~is_end] = documents.weights[~was_end]
    return Documents(
        tokens=tokens,
        starts=starts,
        files=documents.files,
        file=documents.file[owner],
        position=documents.position[owner],
        ids=None if documents.ids is None else tuple(documents.ids[k] for k in owner.tolist()),
        weights=weights,
    )


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


def index_entry(shard: Shard, job: Job, dtype: str, *, weighted: bool) -> dict[str, Any]:
    """What `index.json` says of a shard, for StreamingDataset."""
    return {
        **index_columns(dtype, weighted=weighted),
        "compression": job.compression,
        "hashes": [],
        "raw_data": {"basename": shard.name, "bytes": shard.size, "hashes": {}},
        "samples": shard.documents,
        "size_limit": None,
        "zip_data": None
        if shard.stored_name is None
        else {"basename": shard.stored_name, "bytes": shard.stored_size, "hashes": {}},
    }


def _select(texts: Texts, kept: list[int]) -> Texts:
    return replace(
        texts,
        texts=[texts.texts[k] for k in kept],
        positions=[texts.positions[k] for k in kept],
        ids=None if texts.ids is None else [texts.ids[k] for k in kept],
    )
