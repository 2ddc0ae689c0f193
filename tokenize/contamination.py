"""Find evaluation n-grams in a dataset's documents.

A task decodes a shard's documents. A finding is a word run that a document shares with an
evaluation: n-grams that overlap or follow each other are one finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from ..console.progress import Progress, exact_count
from ..dataplane import tokenizers
from ..dataplane.arrays import Int64
from ..dataplane.datasets.dataset import Dataset
from ..dataplane.shards.documents import format_place
from ..dataplane.storage import storage
from ..dataplane.tokenizers import Tokenizer
from . import executors
from .corpus.evaluations import EvaluationConfig, EvaluationSummary, read_evaluations
from .corpus.ngrams import Hit, Ngrams
from .corpus.words import word_spans
from .executors import ExecutorConfig

TOKENS = 1 << 20
"""Tokens decoded at once; a longer document is decoded by itself."""
MAX_EXCERPT = 120
"""Upper bound on a finding's characters in a table for people."""


@dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    dataset: str
    """Dataset URL; it may be a view."""
    evaluations: EvaluationConfig
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor for the tasks."""


@dataclass(frozen=True, kw_only=True)
class ContaminationFinding:
    """Words that a document shares with an evaluation."""

    document: int
    """Number in the dataset."""
    file: str
    position: int
    id: str | None
    evaluation: str
    record: int
    """The first record in the evaluation that has the first n-gram, from 0."""
    word: int
    """The first word's number in the document."""
    words: int
    start: int
    end: int
    """Place in the document's text, in characters: [start, end)."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """A dataset's findings, in document order."""

    dataset: str
    documents: int
    evaluations: tuple[EvaluationSummary, ...]
    findings: tuple[ContaminationFinding, ...]

    def select_evaluation(self, evaluation: str) -> list[ContaminationFinding]:
        return [finding for finding in self.findings if finding.evaluation == evaluation]


@dataclass(frozen=True)
class SearchTask:
    """A shard, by its number in the dataset."""

    number: int
    tokens: int


@dataclass(frozen=True)
class SearchResult:
    """Findings in part of a shard."""

    findings: list[ContaminationFinding]
    documents: int
    tokens: int


@dataclass(frozen=True)
class ContaminationWorker:
    """Searches a shard's documents."""

    url: str
    ngrams: Ngrams
    names: tuple[str, ...]

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset(self.url)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizers.load(self.dataset.manifest.tokenizer, self.url)

    def __call__(self, task: SearchTask) -> Iterator[SearchResult]:
        dataset = self.dataset
        layout = dataset.open_shard(task.number).layout
        bounds = layout.document_starts + dataset.shard_tokens[task.number]
        ends = bounds[:-1] + layout.document_tokens
        first, number = int(dataset.shard_documents[task.number]), 0
        while number < len(bounds) - 1:
            end = int(np.searchsorted(bounds, bounds[number] + TOKENS, side="right")) - 1
            end = max(end, number + 1)
            texts = self._texts(bounds[number:end], ends[number:end])
            findings = self._search(texts, first + number)
            yield SearchResult(findings, end - number, int(bounds[end] - bounds[number]))
            number = end

    def _texts(self, starts: Int64, ends: Int64) -> list[str]:
        """Decode consecutive documents."""
        ids = np.empty(int(ends[-1] - starts[0]), np.int64)
        self.dataset.fill(int(starts[0]), ids)
        end = self.dataset.manifest.tokenizer.end_of_document
        texts = []
        for low, high in zip(starts - starts[0], ends - starts[0], strict=True):
            document_ids = ids[low:high]
            has_end = len(document_ids) and document_ids[-1] == end
            texts.append(
                self.tokenizer.decode(document_ids[: len(document_ids) - int(has_end)].tolist())
            )
        return texts

    def _search(self, texts: Sequence[str], first: int) -> list[ContaminationFinding]:
        findings: list[ContaminationFinding] = []
        for number, hits in groupby(self.ngrams.find(texts), key=lambda hit: hit.text):
            text, document = texts[number], first + number
            spans = word_spans(text)
            origin = self.dataset.origins(document, document + 1)[0]
            for hit in join_hits(list(hits)):
                start, end = spans[hit.word][0], spans[hit.word + hit.words - 1][1]
                findings.append(
                    ContaminationFinding(
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


def join_hits(hits: Sequence[Hit]) -> list[Hit]:
    """Return a document's hits, those that overlap or touch joined for each evaluation."""
    runs: dict[int, list[Hit]] = {}
    for hit in hits:
        run = runs.setdefault(hit.evaluation, [])
        if run and hit.word <= (last_hit := run[-1]).word + last_hit.words:
            words = max(last_hit.words, hit.word + hit.words - last_hit.word)
            run[-1] = Hit(hit.text, last_hit.word, words, hit.evaluation, last_hit.record)
        else:
            run.append(hit)
    return sorted(
        (hit for run in runs.values() for hit in run), key=lambda hit: (hit.word, hit.evaluation)
    )


def find_contamination(config: ContaminationConfig) -> Contamination:
    """Search a dataset for evaluations' n-grams."""
    url = config.dataset.rstrip("/")
    dataset = Dataset(url)
    evaluations = read_evaluations(config.evaluations)
    sizes = np.diff(dataset.shard_tokens).tolist()
    tasks = [SearchTask(number, size) for number, size in enumerate(sizes)]
    worker = ContaminationWorker(url, evaluations.ngrams, evaluations.names)
    findings: list[ContaminationFinding] = []
    documents = 0
    with Progress("searching", total=sum(sizes), unit="") as progress:
        for result in executors.run(config.engine, worker, tasks):
            findings += result.findings
            documents += result.documents
            progress.advance(result.tokens, documents=result.documents)
    evaluation_numbers = {name: number for number, name in enumerate(evaluations.names)}
    findings.sort(
        key=lambda finding: (finding.document, finding.word, evaluation_numbers[finding.evaluation])
    )
    return Contamination(
        dataset=url, documents=documents, evaluations=evaluations.read, findings=tuple(findings)
    )


def make_json_data(report: Contamination) -> dict[str, Any]:
    """Return the findings as data for JSON."""
    return asdict(report)


def describe(report: Contamination) -> str:
    """Describe the findings as text: a line per evaluation, then a line per finding."""
    contaminated = len({finding.document for finding in report.findings})
    lines = [
        f"{report.dataset}: {contaminated:,} of "
        f"{exact_count(report.documents, 'documents')} are contaminated"
    ]
    for summary in report.evaluations:
        evaluation_findings = report.select_evaluation(summary.name)
        documents = len({finding.document for finding in evaluation_findings})
        lines.append(
            f"  {summary.name}: {exact_count(documents, 'documents')}, "
            f"{exact_count(len(evaluation_findings), 'places')}"
            + (
                f"; {summary.unmatched:,} of its documents are too short"
                if summary.unmatched
                else ""
            )
        )
    for finding in report.findings:
        id = f", id {finding.id}" if finding.id else ""
        place = format_place(finding.file, finding.position)
        lines.append(
            f"document {finding.document} ({place}{id}), word "
            f"{finding.word}: {finding.words} words of {finding.evaluation}, record "
            f"{finding.record + 1}: {_excerpt(finding.text)}"
        )
    return "\n".join(lines)


def _excerpt(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_EXCERPT else text[: MAX_EXCERPT - 2] + " …"


def write_parquet(report: Contamination, url: str) -> None:
    """Write a row per finding."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    strings = ("file", "id", "evaluation", "text")
    schema = pa.schema(
        [
            (name, pa.string() if name in strings else pa.int64())
            for name in ContaminationFinding.__dataclass_fields__
        ]
    )
    rows = [vars(finding) for finding in report.findings]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    storage.write(url, sink.getvalue().to_pybytes())
