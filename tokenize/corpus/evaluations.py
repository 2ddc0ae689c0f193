"""Read evaluations that a corpus must not contain.

An evaluation is a file of JSON lines or Parquet. A record is one document, whose text is all
strings of the record, or those of some fields. A text is contaminated if it has `ngram` consecutive
words of a document; words.py says what a word is.
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
from ..files.input_file import File
from ..files.open_file import open_file
from ..sources.delimited import record_blocks
from ..sources.fields import look_up
from ..sources.format import Slice, SourceConfig
from .inputs import find_files
from .ngrams import ENTRY, Ngrams, digest
from .words import UInt64, Words

log = get_logger(__name__)

BATCH = 256
"""Documents whose words are found at once."""
NAMED = 20
"""Documents without an n-gram that are named for each evaluation; all are counted."""


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
class Evaluation:
    """An evaluation, as it was read. Manifests store it: do not rename its attributes."""

    name: str
    """The file, as the user named it."""
    hash: str
    """Hash of the words of its documents."""
    documents: int
    short: int
    """Documents with fewer words than an n-gram."""
    unmatched: int
    """Short documents that are not looked for."""
    records: tuple[int, ...]
    """Numbers of the first of these, from 0."""


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Evaluations and their n-grams."""

    config: EvaluationConfig
    read: tuple[Evaluation, ...]
    ngrams: Ngrams

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.read)

    @property
    def digest(self) -> str:
        """Return a hash of their words, which names and the order of files do not change."""
        return hashlib.sha256("\n".join(sorted(e.hash for e in self.read)).encode()).hexdigest()


def read_evaluations(config: EvaluationConfig) -> Evaluations:
    """Read evaluations; raise InputError for one without text."""
    source = SourceConfig()
    parts: list[Any] = [np.zeros(0, ENTRY)]
    lengths: set[int] = set()
    found: list[Evaluation] = []
    for number, file in enumerate(find_files(config.evaluations, source, formats=READERS)):
        if file.format not in READERS:
            raise InputError(
                f"the evaluation {file.name} is of the format {file.format}",
                hint="write evaluations as JSON lines or Parquet",
            )
        entries, evaluation = _read(file, number, config, lengths)
        parts += entries
        found.append(evaluation)
    _report(found, config)
    ngrams = Ngrams.of(np.concatenate(parts), sorted(lengths))
    if not len(ngrams.entries):
        raise InputError(
            f"every document of the evaluations has fewer than {config.ngram} words",
            where=", ".join(config.evaluations),
            hint="choose a smaller --ngram, or look for whole documents with --match-short",
        )
    return Evaluations(config=config, read=tuple(found), ngrams=ngrams)


def _read(
    file: File, number: int, config: EvaluationConfig, lengths: set[int]
) -> tuple[list[Any], Evaluation]:
    """Return the n-grams of an evaluation, and what was read; add the numbers of their words."""
    state = hashlib.sha256()
    parts: list[Any] = []
    held = Evaluation(name=file.name, hash="", documents=0, short=0, unmatched=0, records=())
    unmatched: list[int] = []
    words_read = 0
    documents = _texts(file, config)
    while batch := list(itertools.islice(documents, BATCH)):
        words = Words.of([text for _, text in batch])
        hashes: dict[int, UInt64] = {}
        for (record, _), first, last in zip(batch, words.lines[:-1], words.lines[1:], strict=True):
            count = int(last - first)
            state.update(words.run(int(first), count) + b"\n" if count else b"\n")
            words_read += count
            short = count < config.ngram
            held = replace(held, documents=held.documents + 1, short=held.short + short)
            length = count if short else config.ngram
            if short and (config.match_short is None or count < config.match_short):
                unmatched.append(record)
                continue
            if length not in hashes:
                hashes[length] = words.run_hashes(length)
            starts = range(first, last - length + 1)
            entries = np.zeros(len(starts), ENTRY)
            entries["hash"] = hashes[length][starts.start : starts.stop]
            digests = b"".join(digest(words.run(start, length)) for start in starts)
            entries["digest"] = np.frombuffer(digests, ENTRY["digest"])
            entries["evaluation"], entries["record"] = number, record
            parts.append(entries)
            lengths.add(length)
    if not words_read:
        raise InputError(
            f"the evaluation {file.name} has no text in its {held.documents:,} records",
            hint="check the file; --eval-fields names the fields that hold its text",
        )
    few = tuple(unmatched[:NAMED])
    digested = state.hexdigest()
    return parts, replace(held, hash=digested, unmatched=len(unmatched), records=few)


def _report(found: Sequence[Evaluation], config: EvaluationConfig) -> None:
    """Say which documents are not looked for."""
    log.info("evaluations: %d files, %s documents", len(found), f"{_documents(found):,}")
    for each in found:
        if each.unmatched:
            log.warning(
                "%s: %s of %s documents have fewer than %d words and are not looked for, the first "
                "is record %d; --match-short looks for short documents as a whole",
                each.name,
                f"{each.unmatched:,}",
                f"{each.documents:,}",
                config.match_short or config.ngram,
                each.records[0] + 1,
            )


def _documents(found: Sequence[Evaluation]) -> int:
    return sum(each.documents for each in found)


# Records of files


def _texts(file: File, config: EvaluationConfig) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each record."""
    unit, records = READERS[file.format]
    for number, record in records(file):
        value = record
        if config.fields:
            value = [
                _field(record, name, f"{file.name}, {unit} {number + 1}") for name in config.fields
            ]
        yield number, "\n".join(_strings(value))


def _field(record: Any, name: str, where: str) -> Any:
    held = record if isinstance(record, dict) else {}
    try:
        return look_up(held, name)
    except KeyError:
        raise InputError(
            f"a record of an evaluation has no field `{name}` (it has "
            + (", ".join(f"`{key}`" for key in list(held)[:10]) or "none")
            + ")",
            where=where,
            hint="name its fields with --eval-fields, or leave that out to use all strings",
        ) from None


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value, in their order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _json_lines(file: File) -> Iterator[tuple[int, Any]]:
    whole = Slice(file, 0, file.size, 0, file.size)
    for block in record_blocks(whole, b"\n", unit="line", split=False):
        if (problem := block.problem) is not None:
            what = f"an evaluation cannot be read: {problem.kind}: {problem.what}"
            raise InputError(what, where=problem.where(), hint="restore the file from a copy")
        for number, line in enumerate(block.data.split(b"\n"), start=block.first):
            if not line or line.isspace():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"an evaluation cannot be read: not JSON: {error}",
                    where=f"{file.name}, line {number + 1}",
                    hint="write an object on each line; jq -c '.[]' converts an array",
                ) from None


def _rows(file: File) -> Iterator[tuple[int, Any]]:
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


READERS = {"jsonl": ("line", _json_lines), "parquet": ("row", _rows)}
"""The unit of each format of evaluations, and the function that yields its records."""
