"""Find n-grams of evaluations in the documents of a dataset.

A task decodes the documents of a shard. A finding is a run of words that a document shares with an
evaluation: n-grams that overlap or follow each other are one finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from ..console.progress import Progress
from ..dataplane import tokenizers
from ..dataplane.arrays import Int64
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.shards.documents import place_of
from ..dataplane.storage import storage
from ..dataplane.tokenizers import Tokenizer
from . import executors
from .corpus.evaluations import Evaluation, EvaluationConfig, read_evaluations
from .corpus.ngrams import Hit, Ngrams
from .corpus.words import spans
from .executors import ExecutorConfig

TOKENS = 1 << 20
"""Tokens that are decoded at once, but for a longer document."""
SHOWN = 120
"""Most characters of a finding in a table for people."""


@dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    dataset: str
    """The URL of the dataset; it may be a view."""
    evaluations: EvaluationConfig
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Words that a document shares with an evaluation."""

    document: int
    """Number in the dataset."""
    file: str
    position: int
    id: str | None
    evaluation: str
    record: int
    """The first record of the evaluation that has the first n-gram, from 0."""
    word: int
    """Number of the first word in the document."""
    words: int
    start: int
    end: int
    """Place in the document's text, in characters: [start, end)."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """The findings in a dataset, in the order of its documents."""

    dataset: str
    documents: int
    evaluations: tuple[Evaluation, ...]
    findings: tuple[Finding, ...]

    def of(self, evaluation: str) -> list[Finding]:
        return [found for found in self.findings if found.evaluation == evaluation]


@dataclass(frozen=True)
class ShardTask:
    """A shard of the dataset, by its number."""

    number: int
    tokens: int


@dataclass(frozen=True)
class Searched:
    """Part of a shard that was searched."""

    findings: list[Finding]
    documents: int
    tokens: int


@dataclass(frozen=True)
class ContaminationWorker:
    """Searches the documents of a shard."""

    url: str
    ngrams: Ngrams
    names: tuple[str, ...]

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset(self.url)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizers.load(self.dataset.manifest.tokenizer, self.url)

    def __call__(self, task: ShardTask) -> Iterator[Searched]:
        dataset = self.dataset
        layout = dataset.open_shard(task.number).layout
        bounds = layout.document_starts + dataset.shard_tokens[task.number]
        ends = bounds[:-1] + layout.document_tokens
        first, number = int(dataset.shard_documents[task.number]), 0
        while number < len(bounds) - 1:
            last = int(np.searchsorted(bounds, bounds[number] + TOKENS, side="right")) - 1
            last = max(last, number + 1)
            texts = self._texts(bounds[number:last], ends[number:last])
            findings = self._search(texts, first + number)
            yield Searched(findings, last - number, int(bounds[last] - bounds[number]))
            number = last

    def _texts(self, starts: Int64, ends: Int64) -> list[str]:
        """Return the texts of consecutive documents."""
        ids = np.empty(int(ends[-1] - starts[0]), np.int64)
        self.dataset.fill(int(starts[0]), ids)
        end = self.dataset.manifest.tokenizer.end_of_document
        texts = []
        for low, high in zip(starts - starts[0], ends - starts[0], strict=True):
            of = ids[low:high]
            ended = len(of) and of[-1] == end
            texts.append(self.tokenizer.decode(of[: len(of) - int(ended)].tolist()))
        return texts

    def _search(self, texts: Sequence[str], first: int) -> list[Finding]:
        findings: list[Finding] = []
        for number, hits in groupby(self.ngrams.find(texts), key=lambda hit: hit.text):
            text, document = texts[number], first + number
            places = spans(text)
            origin = self.dataset.origins(document, document + 1)[0]
            for hit in joined(list(hits)):
                start, end = places[hit.word][0], places[hit.word + hit.words - 1][1]
                findings.append(
                    Finding(
                        document=document,
                        file=origin.file,
                        position=origin.position,
                        id=origin.id,
                        evaluation=self.names[hit.evaluation],
                        record=hit.record,
                        word=hit.word,
                        words=hit.words,
                        start=start,
                        end=end,
                        text=text[start:end],
                    )
                )
        return findings


def joined(hits: Sequence[Hit]) -> list[Hit]:
    """Return the hits of a document with those of an evaluation joined that overlap or touch."""
    runs: dict[int, list[Hit]] = {}
    for hit in hits:
        of = runs.setdefault(hit.evaluation, [])
        if of and hit.word <= (last := of[-1]).word + last.words:
            words = max(last.words, hit.word + hit.words - last.word)
            of[-1] = Hit(hit.text, last.word, words, hit.evaluation, last.record)
        else:
            of.append(hit)
    return sorted(
        (hit for of in runs.values() for hit in of), key=lambda hit: (hit.word, hit.evaluation)
    )


def contamination(config: ContaminationConfig) -> Contamination:
    """Search a dataset."""
    url = config.dataset.rstrip("/")
    dataset = Dataset(url)
    held = read_evaluations(config.evaluations)
    sizes = np.diff(dataset.shard_tokens).tolist()
    tasks = [ShardTask(number, size) for number, size in enumerate(sizes)]
    worker = ContaminationWorker(url, held.ngrams, held.names)
    findings: list[Finding] = []
    documents = 0
    with Progress("searching", total=sum(sizes), unit="") as progress:
        for part in executors.run(config.engine, worker, tasks):
            findings += part.findings
            documents += part.documents
            progress.advance(part.tokens, documents=part.documents)
    order = {name: number for number, name in enumerate(held.names)}
    findings.sort(key=lambda found: (found.document, found.word, order[found.evaluation]))
    return Contamination(
        dataset=url, documents=documents, evaluations=held.read, findings=tuple(findings)
    )


def as_data(found: Contamination) -> dict[str, Any]:
    """Return the findings as data for JSON."""
    return asdict(found)


def describe(found: Contamination) -> str:
    """Return the findings as text: a line for each evaluation, then one for each finding."""
    contaminated = len({finding.document for finding in found.findings})
    lines = [f"{found.dataset}: {contaminated:,} of {found.documents:,} documents are contaminated"]
    for each in found.evaluations:
        of = found.of(each.name)
        documents = len({finding.document for finding in of})
        lines.append(
            f"  {each.name}: {documents:,} documents, {len(of):,} places"
            + (f"; {each.unmatched:,} of its documents are too short" if each.unmatched else "")
        )
    for finding in found.findings:
        id = f", id {finding.id}" if finding.id else ""
        lines.append(
            f"document {finding.document} ({place_of(finding.file, finding.position)}{id}), word "
            f"{finding.word}: {finding.words} words of {finding.evaluation}, record "
            f"{finding.record + 1}: {_excerpt(finding.text)}"
        )
    return "\n".join(lines)


def _excerpt(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 2] + " …"


def write_parquet(found: Contamination, url: str) -> None:
    """Write a row for each finding."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    strings = ("file", "id", "evaluation", "text")
    schema = pa.schema(
        [
            (name, pa.string() if name in strings else pa.int64())
            for name in Finding.__dataclass_fields__
        ]
    )
    rows = [vars(finding) for finding in found.findings]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    storage.write(url, sink.getvalue().to_pybytes())
