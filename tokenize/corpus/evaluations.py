"""Read evaluations that a corpus must not contain.

An evaluation is a file of JSON lines or Parquet. A record is one document; its text is all strings
in the record, or those in some fields. A text is contaminated if it shares `ngram` consecutive
words with a document; words.py defines a word.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...console.errors import InputError
from ...console.log import get_logger
from ...console.progress import exact_count
from ..files.input_file import File
from ..files.open_file import open_file
from ..sources.delimited import record_blocks
from ..sources.fields import find_value
from ..sources.format import Slice, SourceConfig
from .inputs import find_files
from .ngrams import ENTRY, Ngrams, digest
from .words import UInt64, Words

log = get_logger(__name__)

BATCH = 256
"""Documents split into words at once."""
MAX_RECORDS_NAMED = 20
"""Documents without an n-gram that a summary names; it counts all of them."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    evaluations: tuple[str, ...]
    """Files, globs, folders and URLs of JSON lines or Parquet. The hashes of their words, not the
    names of the files, identify a build."""
    ngram: int = 13
    """A text that has so many consecutive words of a document is contaminated."""
    fields: tuple[str, ...] = ()
    """Fields whose strings are a document; dots lead into objects. Empty: all fields."""
    match_short: int | None = None
    """Look for whole documents of fewer words than `ngram` too, if they have this many. None:
    documents of fewer words are counted, and not looked for."""

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise ValueError("evaluations is empty")
        if self.ngram < 1:
            raise ValueError(f"ngram is {self.ngram}; it must be at least 1 word")
        if self.match_short is not None and not 1 <= self.match_short < self.ngram:
            raise ValueError(
                f"match_short is {self.match_short}; it must be at least 1 and less than ngram "
                f"({self.ngram})"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationSummary:
    """An evaluation's document counts. Manifests store it: do not rename attributes."""

    name: str
    """The file, as the user named it."""
    hash: str
    """Hash over the documents' words."""
    documents: int
    short: int
    """Documents with fewer words than an n-gram."""
    unmatched: int
    """Short documents that are not looked for."""
    records: tuple[int, ...]
    """Record numbers from 0, for the first unmatched documents."""


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Evaluations and their n-grams."""

    config: EvaluationConfig
    read: tuple[EvaluationSummary, ...]
    ngrams: Ngrams

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(evaluation.name for evaluation in self.read)

    @property
    def digest(self) -> str:
        """Return a hash over all words; file names and order do not change it."""
        return hashlib.sha256("\n".join(sorted(e.hash for e in self.read)).encode()).hexdigest()


def read_evaluations(config: EvaluationConfig) -> Evaluations:
    """Read evaluations; raise InputError if one has no text."""
    source = SourceConfig()
    entry_arrays: list[Any] = [np.zeros(0, ENTRY)]
    lengths: set[int] = set()
    summaries: list[EvaluationSummary] = []
    for number, file in enumerate(find_files(config.evaluations, source, formats=READERS)):
        if file.format not in READERS:
            raise InputError(
                f"the evaluation {file.name} is of the format {file.format}",
                hint="write evaluations as JSON lines or Parquet",
            )
        entries, summary = _read(file, number, config, lengths)
        entry_arrays += entries
        summaries.append(summary)
    _log_summary(summaries, config)
    ngrams = Ngrams.from_entries(np.concatenate(entry_arrays), sorted(lengths))
    if not len(ngrams.entries):
        raise InputError(
            f"every document of the evaluations has fewer than {config.ngram} words",
            where=", ".join(config.evaluations),
            hint="choose a smaller --ngram, or look for whole documents with --match-short",
        )
    return Evaluations(config=config, read=tuple(summaries), ngrams=ngrams)


def _read(
    file: File, number: int, config: EvaluationConfig, lengths: set[int]
) -> tuple[list[Any], EvaluationSummary]:
    """Return an evaluation's n-grams and its summary; add their lengths to `lengths`."""
    state = hashlib.sha256()
    entry_arrays: list[Any] = []
    summary = EvaluationSummary(
        name=file.name, hash="", documents=0, short=0, unmatched=0, records=()
    )
    unmatched: list[int] = []
    words_read = 0
    documents = _texts(file, config)
    while batch := list(itertools.islice(documents, BATCH)):
        words = Words.from_texts([text for _, text in batch])
        hashes: dict[int, UInt64] = {}
        for (record, _), first, last in zip(
            batch, words.first_words[:-1], words.first_words[1:], strict=True
        ):
            count = int(last - first)
            state.update(words.join_run(int(first), count) + b"\n" if count else b"\n")
            words_read += count
            short = count < config.ngram
            summary = replace(summary, documents=summary.documents + 1, short=summary.short + short)
            length = count if short else config.ngram
            if short and (config.match_short is None or count < config.match_short):
                unmatched.append(record)
                continue
            if length not in hashes:
                hashes[length] = words.hash_runs(length)
            starts = range(first, last - length + 1)
            entries = np.zeros(len(starts), ENTRY)
            entries["hash"] = hashes[length][starts.start : starts.stop]
            digests = b"".join(digest(words.join_run(start, length)) for start in starts)
            entries["digest"] = np.frombuffer(digests, ENTRY["digest"])
            entries["evaluation"], entries["record"] = number, record
            entry_arrays.append(entries)
            lengths.add(length)
    if not words_read:
        raise InputError(
            f"the evaluation {file.name} has no text in its "
            f"{exact_count(summary.documents, 'records')}",
            hint="check the file; --eval-fields names the fields that hold its text",
        )
    summary = replace(
        summary,
        hash=state.hexdigest(),
        unmatched=len(unmatched),
        records=tuple(unmatched[:MAX_RECORDS_NAMED]),
    )
    return entry_arrays, summary


def _log_summary(summaries: Sequence[EvaluationSummary], config: EvaluationConfig) -> None:
    """Log how many documents were read, and which are too short to match."""
    log.info(
        "evaluations: %d files, %s documents", len(summaries), f"{_count_documents(summaries):,}"
    )
    for summary in summaries:
        if summary.unmatched:
            log.warning(
                "%s: %s of %s documents have fewer than %d words and are not looked for, the first "
                "is record %d; --match-short looks for short documents as a whole",
                summary.name,
                f"{summary.unmatched:,}",
                f"{summary.documents:,}",
                config.match_short or config.ngram,
                summary.records[0] + 1,
            )


def _count_documents(summaries: Sequence[EvaluationSummary]) -> int:
    return sum(summary.documents for summary in summaries)


# Records of files


def _texts(file: File, config: EvaluationConfig) -> Iterator[tuple[int, str]]:
    """Yield record numbers with their texts."""
    unit, records = READERS[file.format]
    for number, record in records(file):
        value = record
        if config.fields:
            value = [
                _field(record, name, f"{file.name}, {unit} {number + 1}") for name in config.fields
            ]
        yield number, "\n".join(_strings(value))


def _field(record: Any, name: str, where: str) -> Any:
    fields = record if isinstance(record, dict) else {}
    try:
        return find_value(fields, name)
    except KeyError:
        raise InputError(
            f"a record of an evaluation has no field `{name}` (it has "
            + (", ".join(f"`{key}`" for key in list(fields)[:10]) or "none")
            + ")",
            where=where,
            hint="name its fields with --eval-fields, or leave that out to use all strings",
        ) from None


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _json_lines(file: File) -> Iterator[tuple[int, Any]]:
    file_slice = Slice(file, 0, file.size, 0, file.size)
    for block in record_blocks(file_slice, b"\n", unit="line", split=False):
        if (problem := block.problem) is not None:
            message = f"an evaluation cannot be read: {problem.kind}: {problem.message}"
            raise InputError(message, where=problem.where(), hint="restore the file from a copy")
        for number, line in enumerate(block.lines(), start=block.first):
            if line.isspace():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"an evaluation cannot be read: not JSON: {error}",
                    where=f"{file.name}, line {number + 1}",
                    hint="write an object on each line; jq -c '.[]' converts an array",
                ) from None


def _parquet_rows(file: File) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(open_file(file.name)) as opened:
            for batch in opened.iter_batches(BATCH, use_threads=False):
                for record in batch.to_pylist():
                    yield number, record
                    number += 1
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"an evaluation cannot be read: {error}",
            where=f"{file.name}, row {number + 1}",
            hint="restore the file from a copy",
        ) from None


READERS = {"jsonl": ("line", _json_lines), "parquet": ("row", _parquet_rows)}
"""By evaluation format: the unit that record numbers count, and the reader of records."""
