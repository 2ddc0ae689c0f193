"""Read a task's documents, except bad and empty ones.

Bad records are counted, and named in the task's statistics. The first one raises an error, unless
the user asked to skip them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

from ...console.errors import InputError
from ...dataplane.tokenizers import Raw
from ...dataplane.tokenizers.added_tokens import NameSearch
from ...dataplane.tokenizers.marks import split_plain_text
from ..chat.config import ChatFields
from ..chat.problems import NOTHING, REFUSED, UNSTEADY
from ..sources import corpus_format
from ..sources.fields import FIELD_KINDS, null_table
from ..sources.format import BadRecord, Slice, SourceConfig, Texts
from .genome import Genome
from .read_stats import MAX_MESSAGES, ReadStats
from .screen import Screen

SKIP = "fix the file, or leave out bad records with --on-error skip"
FIELD_HINT = f"name the right field with --text-field (or --id-field), {SKIP}"
KEEP_HINT = (
    "name the right field, and its type, with --keep NAME:TYPE; if only some records have it, "
    f"write --keep 'NAME:TYPE?'; or {SKIP}"
)
OTHER_TYPE_HINT = f"name the type of its values with --keep NAME:TYPE, {SKIP}"
MESSAGES_HINT = (
    f"name the right fields with --messages-field, or --prompt-field and --response-field, {SKIP}"
)
CHAT_HINT = (
    "conversations are read with --chat by `tokenize build` and `tokenize count`, and with "
    "--conversations by `tokenize neardup`; other commands read one field of text: write the "
    f"conversation into one, name it with --text-field, or {SKIP}"
)
HINTS = {
    "missing field": FIELD_HINT,
    "other schema": FIELD_HINT,
    "other type": OTHER_TYPE_HINT,
    "not JSON lines": "convert it with jq -c 'if type == \"array\" then .[] else . end', or read "
    "it as text with --input-format text",
    NOTHING: "learn whole conversations with --learn all, or leave such records out with "
    "--on-error skip",
    REFUSED: "correct the order of the turns, or leave such records out with --on-error skip",
    UNSTEADY: "change the template, or name another one with --chat",
    "not text": "extract the text of pages with another program, or leave such records out with "
    "--on-error skip",
}
"""Hints by kind of bad record."""
NAMED_FIELD = re.compile("`([^`]+)`")
OTHER_TYPE = re.compile(r"`([^`\[]+)` (?:is a JSON |holds (?:[^()]* \()?)([\w<>]+)\)?, not ")
"""Field and value type, in a bad record's text."""


@dataclass(frozen=True)
class DocumentReader:
    """Reads documents from file slices."""

    config: SourceConfig
    skip_bad: bool
    screen: Screen | None = None
    """Rules that drop documents; None keeps all."""
    genome: Genome | None = None
    """How sequences become documents; None: as they are read."""

    def read(self, slices: Sequence[Slice], stats: ReadStats) -> Iterator[tuple[str, Texts]]:
        """Yield file names with document batches; count in `stats`."""
        for file_slice in slices:
            name, batches = file_slice.file.name, self._read_slice(file_slice, stats)
            if self.genome is not None:
                batches = self.genome.expand(name, batches, stats)
            for texts in batches:
                yield name, texts

    def _read_slice(self, file_slice: Slice, stats: ReadStats) -> Iterator[Texts]:
        records = 0
        for texts in corpus_format(file_slice.file.format).read(file_slice, self.config):
            for problem in texts.problems:
                self.reject(problem)
                stats.add_bad(problem)
            empty = texts.texts.count("")
            if empty:
                stats.counts["empty documents"] += empty
                texts = texts.select([k for k, text in enumerate(texts.texts) if text])
            records += len(texts.texts) + len(texts.problems)
            if self.config.keep:
                texts = self._add_fields(texts, stats)
            if self.screen is not None:
                texts = self.screen.apply(file_slice.file, texts, stats)
            yield texts
        if not records and file_slice.start == 0:
            stats.counts["files without documents"] += 1

    def _add_fields(self, texts: Texts, stats: ReadStats) -> Texts:
        """Add kept fields to texts, all null for formats without fields; count the nulls."""
        if texts.fields is None:
            texts = replace(texts, fields=null_table(len(texts.texts), self.config.keep))
        for name, column in zip(texts.fields.column_names, texts.fields.columns, strict=True):
            stats.counts[f"documents without {name}"] += column.null_count
        return texts

    def reject(self, problem: BadRecord) -> None:
        """Raise InputError for a bad record, unless bad records are skipped.

        An unsteady template may fail for any record, so it is never skipped.
        """
        if not self.skip_bad or problem.kind == UNSTEADY:
            raise InputError(
                f"{problem.kind}: {problem.message}",
                where=problem.where(),
                hint=self._hint(problem),
            )

    def _hint(self, problem: BadRecord) -> str:
        if HINTS.get(problem.kind) == FIELD_HINT and self._is_kept_only(problem):
            return self._type_hint(problem) or KEEP_HINT
        if problem.kind == "other type":
            return self._type_hint(problem) or OTHER_TYPE_HINT
        if problem.kind == "missing field" and self.config.chat is not None:
            return MESSAGES_HINT
        is_conversation = (
            problem.kind == "missing field" and ChatFields().messages in problem.message
        )
        if is_conversation:
            return CHAT_HINT
        if self.genome is not None and self.genome.config.window is not None:
            return "fix the file: windows (--window) exclude --on-error skip"
        return HINTS.get(problem.kind, SKIP)

    def _type_hint(self, problem: BadRecord) -> str | None:
        """Return the hint for a value of a type that `--keep` could name; None for other types."""
        match = OTHER_TYPE.search(problem.message)
        if match is None or match[2] not in FIELD_KINDS:
            return None
        return f"if all its values are {match[2]}, write --keep '{match[1]}:{match[2]}'; or {SKIP}"

    def _is_kept_only(self, problem: BadRecord) -> bool:
        """Return True if only --keep asks for the problem's field, which its text names first."""
        field = NAMED_FIELD.search(problem.message)
        text_fields = (self.config.text_field, self.config.id_field)
        kept_names = {kept.name for kept in self.config.keep}.difference(text_fields)
        return field is not None and field[1] in kept_names


class SpecialNameCounter:
    """Counts texts that contain names of special tokens.

    Such names are encoded as plain text by default; the count warns users if there are many.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        prefix = commonprefix(list(names))  # noqa: RUF071 (characters are meant)
        parts = [prefix] if prefix else names
        self.searches = [NameSearch(part) for part in parts]
        self.byte_searches = [NameSearch(part.encode()) for part in parts]

    def find(self, texts: Sequence[str]) -> list[int]:
        """Return indices of texts that contain a special token's name."""
        if isinstance(texts, Raw) and not any(
            search.is_in(texts.data) for search in self.byte_searches
        ):
            return []
        indices = set().union(*(search.find_texts(texts) for search in self.searches))
        return [k for k in sorted(indices) if any(name in texts[k] for name in self.names)]

    def note(self, file: str, texts: Texts, stats: ReadStats) -> None:
        """Count such texts, and note where the first ones are."""
        plain_texts: Sequence[str] = texts.texts
        if texts.marks is not None:  # the template's own special tokens are no text
            pairs = zip(texts.texts, texts.marks, strict=True)
            plain_texts = ["\0".join(split_plain_text(text, marks)) for text, marks in pairs]
        matches = self.find(plain_texts)
        stats.counts["texts that name special tokens"] += len(matches)
        for k in matches[: MAX_MESSAGES - len(stats.notes)]:
            names = ", ".join(name for name in self.names if name in plain_texts[k])
            note = BadRecord("names special tokens", names, file, texts.positions[k])
            stats.notes.append(str(note))
