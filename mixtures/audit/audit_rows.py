"""What an audit finds: rows and what they hold, documents and the rows that have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from ...dataplane.shards import DocumentOrigin


@dataclass(frozen=True, kw_only=True)
class DocumentInRow:
    """A document of a row."""

    document: int
    """Its number in the dataset."""
    id: str | None
    file: str
    position: int
    tokens: int
    """How many of the row's tokens are its own."""


@dataclass(frozen=True, kw_only=True)
class AuditedRow:
    row: int
    step: int
    phase: str
    source: str
    epoch: int
    documents: tuple[DocumentInRow, ...]
    tokens_hash: str
    text: str | None = None

    def as_json(self) -> str:
        names = ("row", "phase", "source", "epoch", "documents", "tokens_hash")
        data = {name: getattr(self, name) for name in names}
        data["documents"] = [vars(document) for document in self.documents]
        if self.text is not None:
            data["text"] = self.text
        return json.dumps(data)

    def as_text(self) -> str:
        lines = [
            f"row {self.row:,} (step {self.step:,}, phase {self.phase}): source {self.source}, "
            f"epoch {self.epoch}, tokens {self.tokens_hash}"
        ]
        lines += [
            f"  document {document.document:,}{_name(document.id)}: {document.tokens:,} tokens, "
            f"{document.file} at {document.position:,}"
            for document in self.documents
        ]
        if self.text is not None:
            lines += [f"  | {line}" for line in self.text.splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """A row that has tokens of a document."""

    row: int
    step: int
    phase: str
    epoch: int
    first: int
    """The first of the document's tokens that the row takes."""
    tokens: int
    seen: bool | None
    """Whether the run has taken this row; None where there is no ledger."""


@dataclass(frozen=True, kw_only=True)
class AuditedDocument:
    """A document, and all rows of the plan that have it."""

    source: str
    document: int
    origin: DocumentOrigin
    tokens: int
    sightings: tuple[Occurrence, ...]
    text: str | None = None

    def as_json(self) -> Iterator[str]:
        origin = {"id": self.origin.id, "file": self.origin.file, "position": self.origin.position}
        for sighting in self.sightings:
            data = {"source": self.source, "document": self.document, **origin, **vars(sighting)}
            yield json.dumps(data if self.text is None else {**data, "text": self.text})

    def as_text(self) -> str:
        lines = [
            f"document {self.document:,}{_name(self.origin.id)} of {self.source}: {self.tokens:,} "
            f"tokens, {self.origin.file} at {self.origin.position:,}"
        ]
        words = {True: "seen", False: "will be seen", None: "is"}
        lines += [
            f"  {words[at.seen]} in row {at.row:,} (step {at.step:,}, phase {at.phase}, epoch "
            f"{at.epoch}): its tokens {at.first:,} to {at.first + at.tokens:,}"
            for at in self.sightings
        ]
        if not self.sightings:
            lines.append("  no row of this plan has it")
        if self.text is not None:
            lines += [f"  | {line}" for line in self.text.splitlines()]
        return "\n".join(lines)


def _name(id: str | None) -> str:
    return "" if id is None else f" ({id})"
