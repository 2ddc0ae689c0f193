"""Read the documents of a task, without bad and empty ones.

Bad records are counted and named in the task's statistics. The first one is an error, unless the
user asked to skip them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

from ...console.errors import InputError
from ...dataplane.tokenizers import Raw
from ...dataplane.tokenizers.marks import plain_parts
from ..chat.config import ChatFields
from ..chat.problems import NOTHING, REFUSED, UNSTEADY
from ..sources import corpus_format
from ..sources.fields import FIELD_KINDS, no_values
from ..sources.format import BadRecord, Slice, SourceConfig, Texts
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
"""Hints for some kinds of bad records."""
NAMED_FIELD = re.compile("`([^`]+)`")
OTHER_TYPE = re.compile(r"`([^`\[]+)` (?:is a JSON |holds (?:[^()]* \()?)([\w<>]+)\)?, not ")
"""The field and the type of its value, in the text of a bad record."""


@dataclass(frozen=True)
class DocumentReader:
    """Reads the documents of slices."""

    config: SourceConfig
    skip_bad: bool
    screen: Screen | None = None
    """Rules by which documents stay; None: all of them."""

    def read(self, slices: Sequence[Slice], stats: ReadStats) -> Iterator[tuple[str, Texts]]:
        """Yield the name of a file and documents of it; add to `stats`."""
        for part in slices:
            records = 0
            for texts in corpus_format(part.file.format).read(part, self.config):
                for problem in texts.problems:
                    self.reject(problem)
                    stats.add_bad(problem)
                empty = texts.texts.count("")
                if empty:
                    stats.counts["empty documents"] += empty
                    texts = texts.select([k for k, text in enumerate(texts.texts) if text])
                records += len(texts.texts) + len(texts.problems)
                if self.config.keep:
                    texts = self._with_fields(texts, stats)
                if self.screen is not None:
                    texts = self.screen.apply(part.file, texts, stats)
                yield part.file.name, texts
            if not records and part.start == 0:
                stats.counts["files without documents"] += 1

    def _with_fields(self, texts: Texts, stats: ReadStats) -> Texts:
        """Return texts with their kept fields, which are null for formats without fields; count the
        nulls."""
        if texts.fields is None:
            texts = replace(texts, fields=no_values(len(texts.texts), self.config.keep))
        for name, column in zip(texts.fields.column_names, texts.fields.columns, strict=True):
            stats.counts[f"documents without {name}"] += column.null_count
        return texts

    def reject(self, problem: BadRecord) -> None:
        """Raise an error for a bad record, unless bad records are skipped. A template that does not
        suit a record may not suit others either, so it is never skipped."""
        if not self.skip_bad or problem.kind == UNSTEADY:
            raise InputError(
                f"{problem.kind}: {problem.what}",
                where=problem.where(),
                hint=self._hint(problem),
            )

    def _hint(self, problem: BadRecord) -> str:
        if HINTS.get(problem.kind) == FIELD_HINT and self._keeps_alone(problem):
            return self._type_hint(problem) or KEEP_HINT
        if problem.kind == "other type":
            return self._type_hint(problem) or OTHER_TYPE_HINT
        if problem.kind == "missing field" and self.config.chat is not None:
            return MESSAGES_HINT
        talks = problem.kind == "missing field" and ChatFields().messages in problem.what
        if talks:
            return CHAT_HINT
        return HINTS.get(problem.kind, SKIP)

    def _type_hint(self, problem: BadRecord) -> str | None:
        """Return the hint for a value whose type could be kept, but is not the field's."""
        match = OTHER_TYPE.search(problem.what)
        if match is None or match[2] not in FIELD_KINDS:
            return None
        return f"if all its values are {match[2]}, write --keep '{match[1]}:{match[2]}'; or {SKIP}"

    def _keeps_alone(self, problem: BadRecord) -> bool:
        """Return True if the field of a problem, which its text names first, is wanted by --keep
        and by no other option."""
        field = NAMED_FIELD.search(problem.what)
        others = (self.config.text_field, self.config.id_field)
        kept = {kept.name for kept in self.config.keep}.difference(others)
        return field is not None and field[1] in kept


class SpecialNames:
    """Finds texts that contain names of special tokens. Such names are encoded as plain text by
    default; the count warns users whose corpus has many of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.prefix = commonprefix(list(names))  # noqa: RUF071 (characters are meant)

    def find(self, texts: Sequence[str]) -> list[int]:
        """Return the indices of the texts that contain a special token's name."""
        if not self.names or (isinstance(texts, Raw) and self.prefix.encode() not in texts.data):
            return []
        return [
            k
            for k, text in enumerate(texts)
            if self.prefix in text and any(name in text for name in self.names)
        ]

    def note(self, file: str, texts: Texts, stats: ReadStats) -> None:
        """Count such texts, and note the places of the first ones."""
        plain: Sequence[str] = texts.texts
        if texts.marks is not None:  # the template's own special tokens are no text
            pairs = zip(texts.texts, texts.marks, strict=True)
            plain = ["\0".join(plain_parts(text, marks)) for text, marks in pairs]
        matches = self.find(plain)
        stats.counts["texts that name special tokens"] += len(matches)
        for k in matches[: MAX_MESSAGES - len(stats.notes)]:
            names = ", ".join(name for name in self.names if name in plain[k])
            note = BadRecord("names special tokens", names, file, texts.positions[k])
            stats.notes.append(str(note))
