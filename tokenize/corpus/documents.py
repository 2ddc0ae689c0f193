"""The documents of a task, without those that are bad or empty: what every command begins with.

Bad records are counted and named in the task's record; unless they are to be left out, the first
one ends the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

from ...console.errors import InputError
from ...dataplane.tokenizers import Raw
from ..build.task_state import Record
from ..sources import BadRecord, Slice, SourceConfig, Texts, source

NAMED_PROBLEMS = 100
"""How many bad records a task names; it counts all of them."""
FIELD = "name the right field with --text-field (or --id-field), "
HINTS = {"missing field": FIELD, "other schema": FIELD}
"""Hints for a kind of bad record, before the hint for all of them."""


@dataclass(frozen=True)
class Reader:
    config: SourceConfig
    skip_bad: bool

    def read(self, slices: Sequence[Slice], record: Record) -> Iterator[tuple[str, Texts]]:
        """Each file's documents."""
        for part in slices:
            found = 0
            for texts in source(part.file.format).read(part, self.config):
                for problem in texts.problems:
                    self._bad(problem, record)
                empty = texts.texts.count("")
                if empty:
                    record.counts["empty documents"] += empty
                    texts = select(texts, [k for k, text in enumerate(texts.texts) if text])
                found += len(texts.texts) + len(texts.problems)
                yield part.file.name, texts
            if not found and part.start == 0:
                record.counts["files without documents"] += 1

    def refuse(self, problem: BadRecord) -> None:
        """End the task, unless bad records are to be left out."""
        if not self.skip_bad:
            raise InputError(
                f"{problem.kind}: {problem.what}",
                where=problem.where(),
                hint=f"{HINTS.get(problem.kind, '')}fix the file, or leave such records out with "
                "--on-error skip",
            )

    def _bad(self, problem: BadRecord, record: Record) -> None:
        self.refuse(problem)
        record.counts[f"bad: {problem.kind}"] += 1
        if len(record.problems) < NAMED_PROBLEMS:
            record.problems.append(str(problem))


class SpecialNames:
    """Finds the texts that name special tokens: such names are text, unless they are asked for,
    but whoever has a corpus with many may want to know."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.begin = commonprefix(list(names))  # noqa: RUF071 (characters are meant)

    def find(self, texts: Sequence[str]) -> list[int]:
        if not self.names or (isinstance(texts, Raw) and self.begin.encode() not in texts.data):
            return []
        return [
            k
            for k, text in enumerate(texts)
            if self.begin in text and any(name in text for name in self.names)
        ]

    def note(self, file: str, texts: Texts, record: Record) -> None:
        """Count them, and say where the first ones are."""
        found = self.find(texts.texts)
        record.counts["texts that name special tokens"] += len(found)
        for k in found[: NAMED_PROBLEMS - len(record.notes)]:
            names = ", ".join(name for name in self.names if name in texts.texts[k])
            note = BadRecord("names special tokens", names, file, texts.positions[k])
            record.notes.append(str(note))


def select(texts: Texts, kept: Sequence[int]) -> Texts:
    """Some of the texts."""
    return replace(
        texts,
        texts=[texts.texts[k] for k in kept],
        positions=[texts.positions[k] for k in kept],
        ids=None if texts.ids is None else [texts.ids[k] for k in kept],
    )
